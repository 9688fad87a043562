"""Writes the first inputs of the fuzz targets with other people's writers: pip install gguf safetensors numpy."""

import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import save

CORPUS = pathlib.Path(__file__).parent / "corpus"
RNG = np.random.default_rng(1)


def model(arch, extra=lambda writer: None):
    path = CORPUS / "gguf" / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-12)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    tensor(writer, "token_embd.weight", (4, 32))
    tensor(writer, "output_norm.weight", (32,))
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor(writer, name, shape, kind=None):
    values = RNG.standard_normal(shape, dtype=np.float32)
    if kind is None:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def llama(writer):
    types = gguf.GGMLQuantizationType
    tensor(writer, "blk.0.attn_q.weight", (32, 32), types.Q8_0)
    tensor(writer, "blk.0.attn_k.weight", (16, 32), types.Q4_0)
    tensor(writer, "blk.0.attn_v.weight", (16, 32), types.Q5_1)
    tensor(writer, "blk.1.ffn_down.weight", (32, 64), types.BF16)
    tensor(writer, "output.weight", (4, 32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


def qwen3moe(writer):
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(8)
    tensor(writer, "blk.0.ffn_gate_inp.weight", (2, 32))
    tensor(writer, "blk.0.ffn_gate_exps.weight", (2, 8, 32))


def qwen35(writer):
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(8)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(4)
    writer.add_ssm_inner_size(32)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    tensor(writer, "blk.0.ssm_a", (4,))
    tensor(writer, "blk.0.ssm_conv1d.weight", (64, 4))


def gemma3(writer):
    writer.add_sliding_window(16)
    writer.add_sliding_window_pattern([True, False])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def phi3(writer):
    writer.add_rope_scaling_attn_factors(1.19)
    writer.add_rope_scaling_orig_ctx_len(32)
    tensor(writer, "blk.0.attn_qkv.weight", (64, 32))
    writer.add_tensor("rope_factors_long.weight", np.ones(8, dtype=np.float32))
    writer.add_tensor("rope_factors_short.weight", np.ones(8, dtype=np.float32))


def bert(writer):
    tensor(writer, "token_types.weight", (2, 32))


def main():
    for target in ("gguf", "safetensors_header", "manifest", "head"):
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for arch, extra in {"llama": llama, "qwen3moe": qwen3moe, "qwen35": qwen35, "gemma3": gemma3, "phi3": phi3,
                        "bert": bert}.items():
        model(arch, extra)
    for arch in ("qwen2", "qwen3", "smollm3"):
        model(arch)
    tensors = {
        "model.embed_tokens.weight": RNG.standard_normal((4, 3)).astype(np.float16),
        "model.norm.weight": RNG.standard_normal(3).astype(np.float32),
        "empty": np.zeros((0, 2), dtype=np.int64),
        "flags": np.array([True, False]),
    }
    seeds = CORPUS / "safetensors_header"
    (seeds / "four.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    (seeds / "none.safetensors").write_bytes(save({}))
    packed = pathlib.Path(__file__).parent.parent / "crates/firebox-store/tests/fixtures/packed"
    (CORPUS / "packed").mkdir(parents=True, exist_ok=True)
    for folder in sorted(packed.iterdir()):
        both = [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")]
        (CORPUS / "packed" / folder.name).write_bytes(b"\0".join(both))
    manifest = {
        "format": "firebox-bundle", "version": 1, "architecture": "llama", "created_by": "firebox-store 0.1.0",
        "source": "gguf", "quantization": {"bits": "q4", "group": 32}, "hash": "00",
        "segments": [
            {"id": "embed", "file": "segments/embed.safetensors", "bytes": 640, "hash": "0" * 64, "tensors": [
                {"name": "model.embed_tokens.weight", "shape": [4, 33],
                 "encoding": {"tiled": {"bits": "q4", "group": 32}}}]},
            {"id": "layer-0000", "file": "segments/layer-0000.safetensors", "bytes": 640, "hash": "f" * 64,
             "tensors": [
                {"name": "model.layers.0.input_layernorm.weight", "shape": [4], "encoding": {"plain": "F32"}},
                {"name": "model.layers.0.mlp.up_proj.weight", "shape": [2, 256], "encoding": {"block": "Q4_K"}}]},
            {"id": "final", "file": "segments/final.safetensors", "bytes": 8, "hash": "a" * 64, "tensors": []},
        ],
    }
    (CORPUS / "manifest" / "bundle.json").write_text(json.dumps(manifest, indent=1))
    head = {
        "format": "firebox-head", "version": 1, "created_by": "firebox-store 0.1.0", "trunk": "e" * 64, "split": 1,
        "spec": {"kind": "adapter", "rank": 4}, "quantization": {"bits": "q4", "group": 32},
        "segments": [
            {"id": "layer-0001", "file": "layer-0001.safetensors", "bytes": 640, "hash": "f" * 64, "tensors": [
                {"name": "model.layers.1.mlp.up_proj.lora_A.weight", "shape": [4, 33],
                 "encoding": {"tiled": {"bits": "q4", "group": 32}}}]},
            {"id": "final", "file": "final.safetensors", "bytes": 8, "hash": "a" * 64, "tensors": []},
        ],
    }
    (CORPUS / "head" / "head.json").write_text(json.dumps(head, indent=1))
    table = {
        "format": "firebox-heads", "version": 1, "created_by": "firebox-store 0.1.0", "split": 1,
        "next_generation": 4, "heads": [
            {"name": "chat", "active": {"generation": 3, "hash": "b" * 64}, "previous": None},
            {"name": "code", "active": {"generation": 1, "hash": "c" * 64},
             "previous": {"generation": 2, "hash": "d" * 64}},
        ],
    }
    (CORPUS / "head" / "table.json").write_text(json.dumps(table, indent=1))


main()
