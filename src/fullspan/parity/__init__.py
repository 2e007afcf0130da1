"""The same data and the same adapters on several splits of ranks, compared: `fullspan parity`."""
