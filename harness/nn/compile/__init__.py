"""`torch.compile(model, backend="mojo_workbook")`: the workbook's kernels in a model of which nobody changed a line.

`match` finds LayerNorm -> Linear in a graph of Dynamo's, `head` a Linear with its cross-entropy; `backend` swaps and hands the rest on.
"""
