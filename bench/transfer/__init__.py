"""Moving pages between two processes on one machine, ours and others', paired: see `bench.transfer.measure`."""
