"""Models whose files hold packed numbers with scales, as GPTQ, AWQ, compressed-tensors and Model Optimizer write them.

Under an adapter the numbers stay as they are: each layer's codes, scales and zero points are laid out anew once, bit for
bit (`engine.kernels.experts.groups`, NVFP4 and MXFP4 as `engine.kernels.experts` has them), and a product makes the numbers
that they stand for, forward and again in backward, keeping none. Without an adapter they are widened once and trained as
plain numbers; so is a head, whose weight the losses read. What a layer is held in comes from its tensors, so that layers
that were left out, or have other bits than the rest, are read as they lie; the note in config.json says how GPTQ counts
its zero points. transformers' own quantizers want gptqmodel, which wants a newer torch than most have, or widen the
weights at the first pass, as compressed-tensors' do for most formats.

`entries` reads a folder's files, `formats` what each format means, `codes` its bits; `linear` and `experts` are what a model holds
of them, `loading` puts these into a model.
"""
