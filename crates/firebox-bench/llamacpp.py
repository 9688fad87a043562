#!/usr/bin/env python3
"""What llama.cpp makes of a model that firebox-report made.

    llamacpp.py convert HF_DIRECTORY DIRECTORY
    llamacpp.py measure FILE.gguf UNIFIED THREADS PROMPT DEPTH TOKENS BATCH...

UNIFIED is 1 where sequences share one buffer of keys and values, 0 where each has its own. `peak` is without what Python and
the library take before a model is loaded.

Needs the packages numpy, gguf and llama-cpp-python, the last built for the machine (CMAKE_ARGS="-DGGML_NATIVE=ON").
The last line that is printed is JSON.
"""
import ctypes
import json
import pathlib
import resource
import sys
import time

KINDS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    name = name.removesuffix(".weight")
    if name == "model.embed_tokens":
        return "token_embd.weight"
    if name == "model.norm":
        return "output_norm.weight"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[part]}.weight"


def bf16_tensors(path):
    import numpy as np
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, info in header.items():
            begin, end = info["data_offsets"]
            file.seek(start + begin)
            bits = np.frombuffer(file.read(end - begin), np.uint16).astype(np.uint32)
            yield name, (bits << 16).view(np.float32).reshape(info["shape"])


def write_f16(source, path):
    import gguf
    import numpy as np
    config = json.loads((source / "config.json").read_text())
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    out = gguf.GGUFWriter(str(path), config["model_type"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    out.add_token_merges(model["merges"])
    for name, values in bf16_tensors(source / "model.safetensors"):
        out.add_tensor(gguf_name(name), values if values.ndim == 1 else values.astype(np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def silent():
    import llama_cpp
    ignore = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(ignore, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    # It has to live as long as the library calls it.
    return llama_cpp, ignore


def convert(source, folder):
    source, folder = pathlib.Path(source), pathlib.Path(folder)
    folder.mkdir()
    f16 = folder / "f16.gguf"
    write_f16(source, f16)
    llama, _ignore = silent()
    for name, kind in KINDS.items():
        how = llama.llama_model_quantize_default_params()
        how.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama.llama_model_quantize(str(f16).encode(), str(folder / f"{name}.gguf").encode(), how) != 0:
            sys.exit(f"cannot quantize to {kind}")
    print(json.dumps(sorted(path.name for path in folder.iterdir())))


def measure(path, unified, threads, prompt, depth, tokens, *batches):
    llama, _ignore = silent()
    program = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        sys.exit(f"cannot load {path}")
    load = time.perf_counter() - began
    widest = max(batches)
    settings = llama.llama_context_default_params()
    # Otherwise every sequence has an equal part of the context.
    sequence = max(prompt, depth + tokens) + 64
    settings.n_ctx = max(prompt, widest * (depth + tokens)) + 64 if unified else widest * sequence
    settings.n_batch, settings.n_ubatch, settings.n_seq_max = 2048, 512, widest
    settings.n_threads = settings.n_threads_batch = threads
    if hasattr(settings, "kv_unified"):
        settings.kv_unified = bool(unified)
    context = llama.llama_init_from_model(model, settings)
    memory = llama.llama_get_memory(context)
    batch = llama.llama_batch_init(2048, 0, 1)

    def feed(rows):
        batch.n_tokens = len(rows)
        for at, (index, position, sequence, is_last) in enumerate(rows):
            batch.token[at], batch.pos[at] = 100 + index * 7 % 2000, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = is_last
        if llama.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")

    def fill(length, sequence):
        feed([(at + sequence, at, sequence, at == length - 1) for at in range(length)])

    def prefill():
        llama.llama_memory_clear(memory, True)
        began = time.perf_counter()
        fill(prompt, 0)
        return prompt / (time.perf_counter() - began)

    def decode(width):
        llama.llama_memory_clear(memory, True)
        for sequence in range(width):
            fill(depth, sequence)
        began = time.perf_counter()
        for step in range(tokens):
            feed([(step + sequence, depth + step, sequence, True) for sequence in range(width)])
        return width * tokens / (time.perf_counter() - began)

    # Not the time that its context takes to make, which is for many sequences.
    began = time.perf_counter()
    fill(1, 0)
    first = load + time.perf_counter() - began
    prefill()
    decode(1)
    result = {"first": first, "prefill": prefill(), "decode": [decode(width) for width in batches]}
    result["peak"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - program) * 1024
    print(json.dumps(result))


if __name__ == "__main__":
    action, path, *rest = sys.argv[1:]
    if action == "convert":
        convert(path, *rest)
    else:
        measure(path, *map(int, rest))
