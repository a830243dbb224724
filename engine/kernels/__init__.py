"""What the engine computes itself, over pages."""
