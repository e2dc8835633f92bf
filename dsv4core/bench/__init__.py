"""Measures operations and whole layers: any backends and peers, side by side in one run."""
