"""Writes small models in the codings of safetensors and the architectures of GGUF, from which mutations start.

    pip install numpy ml_dtypes safetensors gguf
    python make.py

A seed of `safetensors` is the length of its config.json in two bytes, the config.json, and the weights; one of
`safetensors_index` is the lengths of its config.json, its index and its first shard in four bytes each, these files, and the
second shard; one of `gguf_split` is the length of the first part in four bytes, and both parts. Weights are random.
"""
import json
import pathlib
import ml_dtypes
import numpy as np
import gguf
from safetensors.numpy import save

here = pathlib.Path(__file__).parent
rng = np.random.default_rng(3)
WIDTH, VOCABULARY = 32, 16


def half(*shape):
    return (rng.standard_normal(shape) * 0.1).astype(np.float16)


def word(*shape):
    return rng.integers(-2**31, 2**31, shape).astype(np.int32)


LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=WIDTH, intermediate_size=WIDTH,
             num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=VOCABULARY,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True)
OUTER = lambda: {"model.embed_tokens.weight": half(VOCABULARY, WIDTH), "model.norm.weight": half(WIDTH),
                 "model.layers.0.input_layernorm.weight": half(WIDTH),
                 "model.layers.0.post_attention_layernorm.weight": half(WIDTH)}
PROJECTIONS = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
PROJECTIONS += [f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")]


def rows(module):
    return {f"{module}.weight_packed": word(WIDTH, WIDTH // 8), f"{module}.weight_scale": half(WIDTH, 1),
            f"{module}.weight_zero_point": word(WIDTH // 8, 1),
            f"{module}.weight_shape": np.array([WIDTH, WIDTH], dtype=np.int64)}


def gptq(module):
    return {f"{module}.qweight": word(WIDTH // 8, WIDTH), f"{module}.qzeros": word(1, WIDTH // 8),
            f"{module}.scales": half(1, WIDTH), f"{module}.g_idx": np.zeros(WIDTH, dtype=np.int32)}


def awq(module):
    return {f"{module}.qweight": word(WIDTH, WIDTH // 8), f"{module}.qzeros": word(1, WIDTH // 8),
            f"{module}.scales": half(1, WIDTH)}


def fp8(module):
    codes = rng.integers(0, 100, (WIDTH, WIDTH), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": np.full((1, 1), 0.01, dtype=np.float32)}


CODINGS = {
    "int4-zeros": (rows, dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=dict(group_0=dict(
        targets=["Linear"], weights=dict(num_bits=4, type="int", symmetric=False, group_size=32, strategy="group"))))),
    "gptq": (gptq, dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=False)),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")),
    "fp8": (fp8, dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])),
}


def write(name, config, tensors):
    text = json.dumps(config).encode()
    bytes_ = len(text).to_bytes(2, "little") + text + save({k: np.ascontiguousarray(v) for k, v in tensors.items()})
    (here / "safetensors" / name).write_bytes(bytes_)


for name, (code, quantization) in CODINGS.items():
    tensors = OUTER()
    for module in PROJECTIONS:
        tensors |= code(module)
    write(name, dict(LLAMA, quantization_config=quantization), tensors)

tensors = OUTER()
for module in PROJECTIONS[:4]:
    tensors |= {f"{module}.weight": half(WIDTH, WIDTH), f"{module}.bias": half(WIDTH)}
tensors["model.layers.0.self_attn.sinks"] = half(2)
mlp = "model.layers.0.mlp"
tensors |= {f"{mlp}.router.weight": half(2, WIDTH), f"{mlp}.router.bias": half(2)}
for part, count in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
    tensors[f"{mlp}.experts.{part}_blocks"] = rng.integers(0, 256, (2, count, 1, 16), dtype=np.uint8)
    tensors[f"{mlp}.experts.{part}_scales"] = np.full((2, count, 1), 120, dtype=np.uint8)
    tensors[f"{mlp}.experts.{part}_bias"] = half(2, count)
OSS = dict(LLAMA, architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=2, num_experts_per_tok=1,
           sliding_window=16, attention_bias=True, quantization_config=dict(quant_method="mxfp4"))
write("mxfp4", OSS, tensors)


def gguf_model(name, architecture, keys, tensors):
    writer = gguf.GGUFWriter(here / "gguf" / name, architecture)
    base = dict(block_count=1, context_length=64, embedding_length=WIDTH, feed_forward_length=WIDTH)
    base |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 16,
             "attention.value_length": 16}
    for key, value in (base | keys).items():
        add = {str: writer.add_string, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", half(VOCABULARY, WIDTH))
    writer.add_tensor("output_norm.weight", half(WIDTH).astype(np.float32))
    for part, shape in tensors.items():
        kind = gguf.GGMLQuantizationType.MXFP4 if "_exps.weight" in part else None
        if kind is None:
            writer.add_tensor(f"blk.0.{part}", half(*shape).astype(np.float32 if len(shape) == 1 else np.float16))
        else:
            blocks = rng.integers(0, 120, (*shape[:-1], shape[-1] // 32 * 17), dtype=np.uint8)
            writer.add_tensor(f"blk.0.{part}", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ATTENTION = {f"attn_{p}.weight": (WIDTH, WIDTH) for p in ("q", "k", "v", "output")} | {"attn_norm.weight": (WIDTH,)}
BIASES = {f"attn_{p}.bias": (WIDTH,) for p in ("q", "k", "v", "output")}
EXPERTS = {f"ffn_{p}_exps.weight": (2, WIDTH, WIDTH) for p in ("gate", "up", "down")} | {"ffn_gate_inp.weight": (2, WIDTH)}
gguf_model("gpt-oss", "gpt-oss", {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": WIDTH,
                                  "attention.sliding_window": 16},
           ATTENTION | BIASES | EXPERTS | {"post_attention_norm.weight": (WIDTH,), "attn_sinks.weight": (2,),
                                           "ffn_gate_inp.bias": (2,)}
           | {f"ffn_{p}_exps.bias": (2, WIDTH) for p in ("gate", "up", "down")})
gguf_model("gemma3", "gemma3", {"attention.sliding_window": 16},
           ATTENTION | {f"ffn_{p}.weight": (WIDTH, WIDTH) for p in ("gate", "up", "down")}
           | {f"{p}.weight": (WIDTH,) for p in ("post_attention_norm", "ffn_norm", "post_ffw_norm")}
           | {f"attn_{p}_norm.weight": (16,) for p in "qk"})
gguf_model("glm4moe", "glm4moe", {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": WIDTH,
                                  "rope.dimension_count": 8, "expert_gating_func": 2},
           ATTENTION | {f"attn_{p}.bias": (WIDTH,) for p in "qkv"} | EXPERTS
           | {"post_attention_norm.weight": (WIDTH,), "exp_probs_b.bias": (2,)})
# The gates and ups of experts may share a tensor.
gguf_model("qwen3moe", "qwen3moe", {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": WIDTH},
           ATTENTION | {f"attn_{p}_norm.weight": (16,) for p in "qk"}
           | {"ffn_norm.weight": (WIDTH,), "ffn_gate_inp.weight": (2, WIDTH), "ffn_gate_up_exps.weight": (2, 2 * WIDTH, WIDTH),
              "ffn_down_exps.weight": (2, WIDTH, WIDTH)})
gguf_model("deepseek2", "deepseek2",
           {"attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32, "attention.key_length_mla": 32,
            "attention.value_length_mla": 16, "attention.q_lora_rank": WIDTH, "attention.kv_lora_rank": 32,
            "rope.dimension_count": 16, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.1, "expert_count": 2,
            "expert_used_count": 1, "expert_shared_count": 1, "expert_feed_forward_length": WIDTH, "expert_gating_func": 2,
            "expert_weights_scale": 2.5, "leading_dense_block_count": 0},
           EXPERTS | {f"ffn_{p}_shexp.weight": (WIDTH, WIDTH) for p in ("gate", "up", "down")}
           | {"attn_norm.weight": (WIDTH,), "attn_q_a.weight": (WIDTH, WIDTH), "attn_q_a_norm.weight": (WIDTH,),
              "attn_q_b.weight": (64, WIDTH), "attn_kv_a_mqa.weight": (48, WIDTH), "attn_kv_a_norm.weight": (32,),
              "attn_k_b.weight": (2, 32, 16), "attn_v_b.weight": (2, 16, 32), "attn_output.weight": (WIDTH, WIDTH),
              "ffn_norm.weight": (WIDTH,), "exp_probs_b.bias": (2,)})


# The seeds below are made of those above, with the standard library alone.
def read(source):
    """Returns the configuration and the tensors of a seed of `safetensors`."""
    seed = (here / "safetensors" / source).read_bytes()
    length = int.from_bytes(seed[:2], "little")
    config, weights = json.loads(seed[2:2 + length]), seed[2 + length:]
    length = 8 + int.from_bytes(weights[:8], "little")
    data = weights[length:]
    tensors = {key: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
               for key, entry in json.loads(weights[8:length]).items() if key != "__metadata__"}
    return config, tensors


def file_of(tensors):
    """Returns the bytes of a file of safetensors."""
    header, data = {}, b""
    for key, (dtype, shape, content) in tensors.items():
        header[key] = dict(dtype=dtype, shape=shape, data_offsets=[len(data), len(data) + len(content)])
        data += content
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def derive(source, name, change):
    """Writes another seed of `safetensors` with a changed configuration and changed tensors."""
    config, tensors = change(*read(source))
    config = json.dumps(config).encode()
    (here / "safetensors" / name).write_bytes(len(config).to_bytes(2, "little") + config + file_of(tensors))


def shards(name):
    """Writes a model of `safetensors` in two shards with an index."""
    config, tensors = read(name)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    half = len(tensors) // 2
    halves = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    places = {key: file for file, part in zip(names, halves) for key in part}
    size = sum(len(content) for _, _, content in tensors.values())
    index = json.dumps(dict(metadata=dict(total_size=size), weight_map=places)).encode()
    config = json.dumps(config).encode()
    first, second = map(file_of, halves)
    lengths = b"".join(len(part).to_bytes(4, "little") for part in (config, index, first))
    (here / "safetensors_index").mkdir(exist_ok=True)
    (here / "safetensors_index" / name).write_bytes(lengths + config + index + first + second)


def symmetric(config, tensors):
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    return config, {key: tensor for key, tensor in tensors.items() if not key.endswith("zero_point")}


def scale_of_each_row(config, tensors):
    weights = dict(num_bits=8, type="float", strategy="channel", symmetric=True)
    config["quantization_config"] = dict(quant_method="compressed-tensors", format="float-quantized",
                                         config_groups=dict(group_0=dict(targets=["Linear"], weights=weights)))
    def rows(key, tensor):
        if not key.endswith("weight_scale_inv"):
            return key, tensor
        return key.removesuffix("_inv"), ("F32", [32, 1], tensor[2] * 32)
    return config, dict(rows(key, tensor) for key, tensor in tensors.items())


def split(name):
    """Writes a model of `gguf` in two parts, of which the second has the second half of the tensors."""
    seed = (here / "gguf" / name).read_bytes()
    at = 24
    def take(count):
        nonlocal at
        at += count
        return seed[at - count:at]
    number = lambda count: int.from_bytes(take(count), "little")
    string = lambda: take(number(8))
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    def skip(code):
        if code == 8:
            string()
        elif code == 9:
            inner, count = number(4), number(8)
            for _ in range(count):
                skip(inner)
        else:
            take(sizes[code])
    count = int.from_bytes(seed[8:16], "little")
    for _ in range(int.from_bytes(seed[16:24], "little")):
        string()
        skip(number(4))
    keys, entries = seed[24:at], []
    for _ in range(count):
        start = at
        string()
        take(8 * number(4) + 4)
        entries.append((seed[start:at], number(8)))
    start = -(-at // 32) * 32
    ends = sorted([offset for _, offset in entries] + [len(seed) - start])
    tensors = [(entry, seed[start + offset:start + ends[ends.index(offset) + 1]]) for entry, offset in entries]
    text = lambda value: len(value).to_bytes(8, "little") + value
    def part(number, keys, key_count, tensors):
        for key, code, size, value in ((b"split.no", 2, 2, number), (b"split.count", 2, 2, 2),
                                       (b"split.tensors.count", 5, 4, count)):
            keys += text(key) + code.to_bytes(4, "little") + value.to_bytes(size, "little")
        file = b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little")
        file += (key_count + 3).to_bytes(8, "little") + keys
        data = b""
        for entry, content in tensors:
            file += entry + len(data).to_bytes(8, "little")
            data += content + b"\0" * (-len(content) % 32)
        return file + b"\0" * (-len(file) % 32) + data
    half = count // 2
    first = part(0, keys, int.from_bytes(seed[16:24], "little"), tensors[:half])
    (here / "gguf_split" / name).write_bytes(
        len(first).to_bytes(4, "little") + first + part(1, b"", 0, tensors[half:]))


derive("int4-zeros", "int4", symmetric)
derive("fp8", "fp8-rows", scale_of_each_row)
split("llama")
shards("llama")
shards("fp8")
