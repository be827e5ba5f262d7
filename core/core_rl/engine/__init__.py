"""The public engines: `TrainEngine` and `InferenceEngine`."""
