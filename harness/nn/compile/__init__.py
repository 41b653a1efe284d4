"""The torch.compile backend: `match` and `head` find the layers that `backend` replaces in a Dynamo graph."""
