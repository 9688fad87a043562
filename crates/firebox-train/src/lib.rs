//! Trains models, heads and low-rank adapters.
