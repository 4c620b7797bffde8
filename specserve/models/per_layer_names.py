"""Names of the tensors of per-layer inputs, see per_layer.py. Does not import torch."""

TABLE, PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
NORM = "model.per_layer_projection_norm"
GATE, OUT = "per_layer_input_gate", "per_layer_projection"  # a layer's maps
OUT_NORM = "post_per_layer_input_norm"
