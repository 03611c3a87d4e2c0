"""Rendering: tensors and labels to text, pictures and pages; no model, no file, no printing."""
