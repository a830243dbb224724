"""`kvferry bench engine`: what a step of the engine takes, and what the machine would allow."""
