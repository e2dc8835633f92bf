"""The backends that come with the core, through the same entry-point group as all others."""
