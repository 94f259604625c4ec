"""The DFlash algorithm as pure tensors: model, anchors, attention mask, loss, metrics. No I/O, no processes."""
