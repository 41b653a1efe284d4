"""The torch.compile backend: `match` and `head` find what `backend` replaces in a Dynamo graph."""
