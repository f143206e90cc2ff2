"""Tensors in, tensors out: configuration, weights, tokenizer and the forward of each family."""
