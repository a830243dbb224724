"""The model folder: which models are known by name, fetching and converting them once, and where they are kept."""
