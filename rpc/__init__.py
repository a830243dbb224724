"""gRPC between the processes: generated messages in `rpc.v1`, and how servers and channels are set up."""
