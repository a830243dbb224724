"""Configuration, the `kvferry` command, the model folder, and starting the service on Ray."""
