"""The parameter budget: every row of the table as a closed form of the configuration, without building anything."""

from __future__ import annotations

from model.trellis.config import BANK_READ_POINTS, GDN, GLOBAL, SLIDING, TrellisConfig

SERVING_ROWS = (
    "prelude_untied", "core_block_tied", "coda_untied", "per_loop_lora", "routers_gates_norms", "embeddings_tied", "memory_bank",
)  # fmt: skip
AUX_ROW = "training_aux_heads"


def compute_parameters(config: TrellisConfig) -> dict[str, int]:
    """Parameters by row. The row of routers, gates and norms has no term for the sliding gate; the codebooks are in no row."""
    gdn, attention = _gdn_layer(config), _attention_layer(config)
    return {
        "prelude_untied": _part(config.prelude, gdn, attention),
        "core_block_tied": _part(config.core, gdn, attention),
        "coda_untied": _part(config.coda, gdn, attention),
        "per_loop_lora": _lora(config),
        "routers_gates_norms": _small(config),
        "embeddings_tied": config.vocab_size * config.d_model,
        "memory_bank": config.bank_sub_keys**2 * config.bank_value_dim
        + BANK_READ_POINTS * config.d_model * (config.bank_heads * 2 * config.bank_key_dim + config.bank_value_dim),
        AUX_ROW: _aux(config),
    }


def codebooks(config: TrellisConfig) -> int:
    """Entries of the bank's two sets of keys."""
    return 2 * config.bank_sub_keys * config.bank_key_dim


def _part(kinds: tuple[str, ...], gdn: int, attention: int) -> int:
    return kinds.count(GDN) * gdn + (len(kinds) - kinds.count(GDN)) * attention


def _gdn_layer(config: TrellisConfig) -> int:
    """q, k, v, o, decay and rate projections, convolutions of q, k and v, and the MLP."""
    d, keys, values = config.d_model, config.gdn_heads * config.gdn_key_dim, config.gdn_heads * config.gdn_value_dim
    return d * (2 * keys + 2 * values) + 2 * d * config.gdn_heads + config.gdn_conv * (2 * keys + values) + 3 * d * config.mlp_dim


def _attention_layer(config: TrellisConfig) -> int:
    width, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return config.d_model * (2 * width + 2 * kv) + 3 * config.d_model * config.mlp_dim


def _lora(config: TrellisConfig) -> int:
    """Adapters of q, up and down in every core layer, for every loop but the first."""
    d = config.d_model
    queries = {GDN: config.gdn_heads * config.gdn_key_dim, SLIDING: config.heads * config.head_dim}
    sites = sum((d + queries[kind]) + 2 * (d + config.mlp_dim) for kind in config.core)
    return (config.k_max - 1) * config.lora_rank * sites


def _small(config: TrellisConfig) -> int:
    """Layer norms, gains of each loop, the final norm, routers and exit heads with biases, and norms inside mixers and bank."""
    d, k, layers = config.d_model, config.k_max, config.layers
    norms = 2 * d * len(layers) + k * len(config.core) * 2 * d + d
    scorers = (k - 1) * (d + 1) + k * (d + 1)
    normed = {"sliding": layers.count(SLIDING), "all": layers.count(SLIDING) + layers.count(GLOBAL), "none": 0}[config.qk_norm]
    inner = layers.count(GDN) * config.gdn_heads * config.gdn_value_dim + normed * 2 * config.head_dim
    return norms + scorers + inner + (BANK_READ_POINTS * config.bank_value_dim if config.bank_read_norm else 0)


def _aux(config: TrellisConfig) -> int:
    spec = config.aux
    if spec is None:
        return 0
    labels = spec.boundary_labels + spec.ast_labels + spec.type_labels
    tokens = 3 * config.d_model * spec.width + spec.width * labels
    return tokens + 2 * config.d_model * spec.dfg_width + spec.dfg_labels * spec.dfg_width
