"""What everything stands on: the device, autograd, host memory, names, sizes, the trace."""
