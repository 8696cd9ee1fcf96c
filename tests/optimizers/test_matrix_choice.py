"""Which parameters Muon updates: the default rule on names of public models, a user's choice, and what is logged."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.logs import logged
from tests.methods.test_bases import SHAPES
from tests.pool import Pool
from tests.training import LAYOUTS, METHODS, train
from torchtitan_scape.core.hidden_matrices import is_hidden_matrix
from torchtitan_scape.core.workloads import LocalModel, layer_of
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.optimizers.muon import Muon

# Model -> (names that Muon updates, names that AdamW updates); all of shape (16, 24).
PUBLIC: dict[str, tuple[str, str]] = {
    "TorchTitan's Llama": (
        "layers.0.attention.wq.weight layers.11.feed_forward.w2.weight",
        "tok_embeddings.weight output.weight",
    ),
    "Llama of transformers": (
        "model.layers.0.self_attn.q_proj.weight model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight lm_head.weight",
    ),
    "GPT-NeoX": ("gpt_neox.layers.0.attention.query_key_value.weight", "gpt_neox.embed_in.weight embed_out.weight"),
    "nanoGPT": ("transformer.h.0.attn.c_attn.weight transformer.h.0.mlp.c_proj.weight", "transformer.wte.weight"),
    "nanochat": (
        "transformer.h.0.attn.c_q.weight transformer.h.0.attn.ve_gate.weight",
        "value_embeds.1.weight transformer.wte.weight lm_head.weight",
    ),
    "modded-nanogpt": ("blocks.0.mlp.c_fc", "embed.weight value_embeds.0.weight"),
    "Karpathy's lecture": (
        "blocks.0.sa.heads.0.key.weight blocks.0.ffwd.net.0.weight",
        "position_embedding_table.weight",
    ),
    "LLMs-from-scratch": ("trf_blocks.0.att.W_query.weight trf_blocks.0.ff.layers.0.weight", "tok_emb.weight"),
    "Mixtral": (
        "model.layers.0.block_sparse_moe.experts.0.w1.weight model.layers.0.block_sparse_moe.gate.weight",
        "lm_head.weight",
    ),
    "DeepSeek-V3": (
        "model.layers.3.mlp.shared_experts.up_proj.weight model.layers.0.self_attn.q_a_proj.weight "
        "model.layers.61.eh_proj.weight",
        "model.layers.61.shared_head.head.weight model.layers.61.embed_tokens.weight",
    ),
    "gpt-oss": ("model.layers.0.mlp.router.weight", "model.layers.0.mlp.experts.gate_up_proj_bias"),
    "Cohere": ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight"),
    "BERT": (
        "encoder.layer.0.attention.output.dense.weight encoder.layer.0.output.dense.weight",
        "embeddings.word_embeddings.weight pooler.dense.weight classifier.weight",
    ),
    "sentence-transformers": (
        "0.auto_model.encoder.layer.3.attention.self.query.weight",
        "0.auto_model.embeddings.word_embeddings.weight 2.linear.weight",
    ),
    "T5": (
        "encoder.block.0.layer.0.SelfAttention.q.weight encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
        "shared.weight encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "Transformer of 2017": ("encoder.layer_stack.0.pos_ffn.w_1.weight", "encoder.src_word_emb.weight"),
    "ViT of timm": ("blocks.0.attn.qkv.weight blocks.0.mlp.fc1.weight", "head.weight"),
    "ViT of torchvision": (
        "encoder.layers.encoder_layer_0.self_attention.in_proj_weight encoder.layers.encoder_layer_0.mlp.0.weight",
        "heads.head.weight",
    ),
    "Swin": (
        "layers.0.blocks.0.attn.qkv.weight layers.0.downsample.reduction.weight",
        "layers.0.blocks.0.attn.relative_position_bias_table layers.0.blocks.0.attn.cpb_mlp.0.weight",
    ),
    "ConvNeXt": ("stages.1.blocks.2.mlp.fc1.weight features.1.0.block.3.weight", "head.fc.weight classifier.2.weight"),
    "SAM": ("image_encoder.blocks.0.attn.qkv.weight", "image_encoder.blocks.0.attn.rel_pos_h"),
    "MLP-Mixer": ("blocks.0.mlp_tokens.fc1.weight", "stem.proj.weight"),
    "open_clip": (
        "transformer.resblocks.0.attn.in_proj_weight transformer.resblocks.0.mlp.c_fc.weight "
        "visual.trunk.blocks.0.mlp.fc1.weight",
        "token_embedding.weight positional_embedding text_projection",
    ),
    "DiT": (
        "blocks.0.attn.qkv.weight blocks.0.adaLN_modulation.1.weight",
        "t_embedder.mlp.0.weight final_layer.adaLN_modulation.1.weight y_embedder.embedding_table.weight",
    ),
    "Flux": (
        "double_blocks.0.img_mlp.0.weight single_blocks.0.linear1.weight",
        "img_in.weight time_in.in_layer.weight",
    ),
    "diffusers": ("transformer_blocks.0.norm1.linear.weight", "proj_out.weight"),
    "AlphaFold": ("blocks.0.attention_pair_bias.attention.linear_q.weight", "linear_out.weight"),
    "Mamba": (
        "backbone.layers.0.mixer.in_proj.weight backbone.layers.0.mixer.dt_proj.weight",
        "backbone.embeddings.weight backbone.layers.0.mixer.A_log",
    ),
    "S4D": ("layers.0.output_linear.0.weight", "layers.0.kernel.C layers.0.kernel.log_A_real layers.0.kernel.A_imag"),
    "RWKV": (
        "blocks.0.att.key.weight blocks.0.ffn.value.weight blocks.0.att.w1",
        "emb.weight head.weight blocks.0.att.time_decay blocks.0.att.time_faaaa blocks.0.att.r_k",
    ),
    "Conformer": ("layers.0.self_attn.linear_pos.weight", "layers.0.self_attn.pos_bias_u"),
    "LoRA": (
        "model.layers.0.self_attn.q_proj.base_layer.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight layers.0.attn.q_proj.lora_b.weight",
    ),
    "weight norm": ("layers.0.parametrizations.weight.original1", "net.0.parametrizations.weight.original1"),
    "Musicgen": ("decoder.layers.0.fc1.weight", "decoder.embed_tokens.0.weight lm_heads.0.weight"),
    "learned tokens": ("layers.0.attn.q.weight", "layers.0.prompt_tokens layers.0.latents"),
    "MLPs": (
        "layers.0.weight hidden_layers.2.weight",
        "0.weight 2.weight 0.0.weight net.0.weight classifier.3.weight layer1.weight layer1.0.weight",
    ),
    "heads and embeddings of several layers": (
        "layers.0.unbiased.weight layers.0.q_head.weight layers.0.kv_head.weight layers.0.attn.head.weight "
        "attention.heads.0.key.weight multi_head.layers.0.query.weight embedder.layers.0.wq.weight",
        "lm_head.layers.0.weight classifier.layers.0.weight score.layers.0.fc.weight heads.0.mlp.fc.weight "
        "embeddings.layers.0.proj.weight model.patch_embed.blocks.1.fc.weight layers.0.mlm_head.weight "
        "layers.0.rel_bias.weight",
    ),
}


@pytest.mark.parametrize("model", PUBLIC)
def test_the_default_for_public_models(model: str) -> None:
    muons, others = (names.split() for names in PUBLIC[model])
    assert [name for name in muons if not is_hidden_matrix(name, (16, 24))] == []
    assert [name for name in others if is_hidden_matrix(name, (16, 24))] == []
    assert not is_hidden_matrix(muons[0], (16,)) and not is_hidden_matrix(muons[0], (16, 3, 4, 4))


@pytest.mark.parametrize(
    ("name", "shape", "is_hidden"),
    [
        ("layers.0.moe.experts.w1", (4, 16, 24), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 16, 24), True),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (4, 16, 24), True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 1, 24), False),
        ("backbone.layers.0.mixer.conv1d.weight", (32, 1, 4), False),
        ("conv_layers.0.conv.weight", (32, 16, 4), False),
        ("blocks.0.attn.qkv_w", (3, 16, 24), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 24), False),
        ("layers.0.parametrizations.weight.original0", (16, 1), False),
        ("layer1.0.conv1.weight", (16, 16, 3, 3), False),
    ],
)
def test_the_default_for_other_shapes(name: str, shape: tuple[int, ...], is_hidden: bool) -> None:
    assert is_hidden_matrix(name, shape) == is_hidden


def test_the_families_of_this_repository_have_the_matrices_of_earlier_versions() -> None:
    """Two dimensions, in a list that is called `layers`, on meta devices."""
    from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS
    from torchtitan_scape.models.llama import LLAMA_ARGS, Llama

    with torch.device("meta"):
        models = [Llama(next(iter(LLAMA_ARGS.values()))), GPT2(next(iter(GPT2_ARGS.values())))]
    for model in models:
        named = dict(model.named_parameters())
        before = {name for name, p in named.items() if p.ndim == 2 and layer_of(name) is not None}
        assert before and {name for name, p in named.items() if is_hidden_matrix(name, p.shape)} == before


def parameters(**shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace("__", "."), nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]


MODEL: dict[str, Any] = dict(
    embed__weight=(30, 8),
    net__0__weight=(8, 8),
    net__0__bias=(8,),
    net__2__weight=(8, 8),
    layers__0__wq__weight=(8, 8),
    layers__0__norm__weight=(8,),
    conv__weight=(4, 8, 3, 3),
)


def chosen(**options: Any) -> list[str]:
    return sorted(shard.name for shard in Muon(parameters(**MODEL), **options).hidden)


def test_a_users_choice() -> None:
    assert chosen() == ["layers.0.wq.weight"]
    both = ["net.0.weight", "net.2.weight"]
    assert chosen(matrices=["net.0.weight", "net.[2-9].*"]) == both
    assert chosen(matrices="net.*") == both  # a pattern leaves out the bias
    assert chosen(matrices=lambda name, p: name.startswith("net") and p.ndim == 2) == both
    assert chosen(matrices=["*.wq.weight", "net.2.weight"]) == ["layers.0.wq.weight", "net.2.weight"]


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (["net.*", "nets.*"], r"'nets\.\*', which matches no parameter; the first is 'embed.weight'"),
        (["net.0.bias"], r"chooses 'net.0.bias' of shape \(8,\).* leave it out, so that AdamW updates it"),
        (["layers.*.norm.*"], r"chooses 'layers.0.norm.weight' of shape \(8,\)"),
        (["conv.*"], r"chooses 'conv.weight' of shape \(4, 8, 3, 3\)"),
        (lambda name, p: True, r"chooses 'net.0.bias'"),
        (lambda name, p: False, r"chooses none of the 7 parameters from 'embed.weight'; pass matrices="),
        ([], "chooses none"),
        ([3], "has a value of type int; pass names or patterns"),
        (5, "has a value of type int; pass names or patterns"),
        (nn.Parameter(torch.ones(2, 2)), "has a value of type Parameter; pass names"),
        ([nn.Parameter(torch.ones(2, 2))], "has a value of type Parameter; pass names"),
        (["lm.weight"], "matches no parameter; .*; a tied weight has the first of its names"),
    ],
)
def test_impossible_choices_are_refused(matrices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(matrices=matrices)


def test_parameters_without_names_and_without_blocks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"pass model.named_parameters\(\) instead of model.parameters\(\)"):
        Muon(model.parameters())
    with pytest.raises(ValueError, match=r"none of '0.weight' to '2.bias' is one; pass matrices=.*name = 'AdamW'"):
        Muon(model.named_parameters())
    assert len(Muon(model.named_parameters(), matrices=["2.weight"]).hidden) == 1


def test_param_groups_cannot_be_added_later() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    groups = [{"params": [(f"{i}.{n}", p) for n, p in m.named_parameters()]} for i, m in enumerate((first, second))]
    optimizer = Muon(groups, matrices=["*.weight"])
    assert len(optimizer.hidden) == 2
    with pytest.raises(RuntimeError, match=r"cannot add the param group \['params'\].*; build a new Muon"):
        optimizer.add_param_group({"params": list(nn.Linear(8, 8).named_parameters())})


def test_the_choice_is_logged() -> None:
    with logged() as lines:
        Muon(parameters(**MODEL), matrices=["net.*.weight"])
        experts = {"layers__0__moe__experts__w1": (4, 64, 32)}
        Muon(parameters(layers__0__wq__weight=(8, 8), **experts), split={"*.wq.*": 2})
    assert lines == [
        "Muon: 2 parameters of 128 entries ('net.0.weight', 'net.2.weight'), 0 divided into blocks; AdamW: 5 "
        "parameters of 608 entries ('conv.weight', 'embed.weight', 'layers.0.wq.weight' and 2 others)",
        "Muon: 2 parameters of 8,256 entries ('layers.0.moe.experts.w1', 'layers.0.wq.weight'), 1 divided into blocks; "
        "AdamW: 0 parameters of 0 entries ()",
    ]


def lines_of_a_run(folder: str, arguments: list[str]) -> list[str]:
    with logged() as lines:
        train(folder, [*arguments, "--training.steps=1"])
    return [line for line in lines if line.startswith("Muon: ")]


def test_the_trainer_logs_the_choice_once(pool1: Pool, pool2: Pool, tmp_path: Path) -> None:
    """For three simulated replicas as well, each of which has an optimizer."""
    results = pool2(lines_of_a_run, str(tmp_path / "two"), [*METHODS["muon"], *LAYOUTS["1x2"]])
    simulated = [*METHODS["diloco-muon"], "--topology.simulate_replicas=3"]
    for (line,) in [*results, *pool1(lines_of_a_run, str(tmp_path / "three"), simulated)]:
        assert re.fullmatch(
            r"Muon: \d+ parameters of \d+,\d+ entries \('layers\..* and \d+ others\), 0 divided into blocks; AdamW: "
            r"\d+ parameters of \d+,\d+ entries \('tok_embeddings.weight', 'output.weight', .* and \d+ others\)",
            line,
        ), line


def test_stacks_of_unknown_meaning_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Not convolutions, embeddings and what a user leaves out."""
    shapes: dict[str, Any] = dict(blocks__0__attn__qkv_w=(3, 8, 8), blocks__0__conv__weight=(8, 8, 3))
    shapes |= dict(blocks__0__c_fc=(8, 8), blocks__0__pos_embed=(4, 8, 8), wte__weight=(20, 8))
    Muon(parameters(**shapes))
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING)
    assert "AdamW updates parameters of blocks with three dimensions ('blocks.0.attn.qkv_w')" in warning
    caplog.clear()
    Muon(parameters(**shapes), matrices=["*.c_fc"])
    assert not [entry for entry in caplog.records if entry.levelno == logging.WARNING]


def test_the_planner_follows_the_choice() -> None:
    optimizer = Muon(parameters(**MODEL), matrices=["net.*"])
    names = tuple(name.replace("__", ".") for name in MODEL)
    model = LocalModel(names, tuple(MODEL.values()), frozenset({"net.0.weight", "net.2.weight"}))
    held = sum(t.nbytes for state in optimizer.state.values() for kind, t in state.items() if kind != "step")
    assert get_optimizer_cost("Muon").state(model) == held
    assert LocalModel(tuple(SHAPES), tuple(SHAPES.values())).hidden_shapes == list(SHAPES.values())[1:4]
