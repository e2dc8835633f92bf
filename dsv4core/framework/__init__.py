"""From installed packages to bound layers: discovery, loading, selection, binding. No torch at import."""
