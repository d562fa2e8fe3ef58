//! Writes small GGUF files for tests, both valid and invalid ones.

/// A GGUF file under construction. Tensor data is laid out in order, aligned to 32 bytes.
#[derive(Clone, Default)]
pub(crate) struct GgufWriter {
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<TensorLine>,
}

#[derive(Clone)]
struct TensorLine {
    name: String,
    /// Innermost dimension first, as in the file.
    dimensions: Vec<u64>,
    code: u32,
    data: Vec<u8>,
}

const F32: u32 = 0;
const Q8_0: u32 = 8;

impl GgufWriter {
    pub(crate) fn raw(mut self, key: &str, code: u32, bytes: Vec<u8>) -> Self {
        self.keys.retain(|(known, ..)| known != key);
        self.keys.push((key.to_owned(), code, bytes));
        self
    }

    pub(crate) fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(known, ..)| known != key);
        self.tensors.retain(|tensor| tensor.name != key);
        self
    }

    pub(crate) fn unsigned(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    pub(crate) fn float(self, key: &str, value: f32) -> Self {
        self.raw(key, 6, value.to_le_bytes().to_vec())
    }

    pub(crate) fn boolean(self, key: &str, value: bool) -> Self {
        self.raw(key, 7, vec![value.into()])
    }

    pub(crate) fn string(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, string_bytes(value))
    }

    pub(crate) fn strings(self, key: &str, values: &[String]) -> Self {
        let body = values.iter().flat_map(|value| string_bytes(value)).collect();
        self.array(key, 8, values.len(), body)
    }

    pub(crate) fn integers(self, key: &str, values: &[i32]) -> Self {
        let body = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 5, values.len(), body)
    }

    pub(crate) fn floats(self, key: &str, values: &[f32]) -> Self {
        let body = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.array(key, 6, values.len(), body)
    }

    pub(crate) fn array(self, key: &str, code: u32, count: usize, body: Vec<u8>) -> Self {
        let mut bytes = code.to_le_bytes().to_vec();
        bytes.extend((count as u64).to_le_bytes());
        bytes.extend(body);
        self.raw(key, 9, bytes)
    }

    /// Adds a tensor of any type; `dimensions` are innermost first.
    pub(crate) fn tensor(mut self, name: &str, dimensions: &[u64], code: u32, data: Vec<u8>) -> Self {
        self.tensors.push(TensorLine { name: name.to_owned(), dimensions: dimensions.to_vec(), code, data });
        self
    }

    /// Adds an F32 tensor of small values; `shape` is outermost first.
    pub(crate) fn weights(self, name: &str, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        let data =
            (0..count).flat_map(|at| (((at * 7 + name.len()) % 13) as f32 * 0.01 + 0.01).to_le_bytes());
        let dimensions: Vec<u64> = shape.iter().rev().map(|size| *size as u64).collect();
        self.tensor(name, &dimensions, F32, data.collect())
    }

    /// Adds a Q8_0 tensor of pseudorandom values; `shape` is outermost first.
    fn quantized(self, name: &str, [rows, columns]: [usize; 2]) -> Self {
        let mut state = name.bytes().fold(17u32, |state, byte| state.wrapping_mul(31) + u32::from(byte));
        let mut data = Vec::new();
        for _ in 0..rows * columns / 32 {
            // 2^-9 in half precision.
            data.extend(0x1800u16.to_le_bytes());
            for _ in 0..32 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                data.push((state >> 24) as u8);
            }
        }
        self.tensor(name, &[columns as u64, rows as u64], Q8_0, data)
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        self.build_with(3, self.tensors.len() as u64, self.keys.len() as u64)
    }

    /// Builds the file with a header that may contradict its contents.
    pub(crate) fn build_with(&self, version: u32, tensor_count: u64, key_count: u64) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(version.to_le_bytes());
        file.extend(tensor_count.to_le_bytes());
        file.extend(key_count.to_le_bytes());
        for (key, code, bytes) in &self.keys {
            file.extend(string_bytes(key));
            file.extend(code.to_le_bytes());
            file.extend(bytes);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            file.extend(string_bytes(&tensor.name));
            file.extend((tensor.dimensions.len() as u32).to_le_bytes());
            tensor.dimensions.iter().for_each(|size| file.extend(size.to_le_bytes()));
            file.extend(tensor.code.to_le_bytes());
            file.extend(offset.to_le_bytes());
            offset = (offset + tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(32), 0);
            file.extend(&tensor.data);
        }
        file
    }
}

/// Returns a complete llama model with one layer: width 8, 2 heads over 1 KV head, 262 byte-level
/// tokens.
pub(crate) fn tiny_llama() -> GgufWriter {
    let mut tokens: Vec<String> =
        crate::tokenizer::byte_level_characters().iter().map(char::to_string).collect();
    tokens.extend(["he", "ll", "hell", "hello"].map(str::to_owned));
    tokens.extend(["<|endoftext|>", "<|im_end|>"].map(str::to_owned));
    let mut types = vec![1; tokens.len() - 2];
    types.extend([3, 3]);
    let merges = ["h e", "l l", "he ll", "hell o"].map(str::to_owned);
    GgufWriter::default()
        .string("general.architecture", "llama")
        .unsigned("llama.context_length", 64)
        .unsigned("llama.embedding_length", 8)
        .unsigned("llama.block_count", 1)
        .unsigned("llama.feed_forward_length", 16)
        .unsigned("llama.attention.head_count", 2)
        .unsigned("llama.attention.head_count_kv", 1)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .float("llama.rope.freq_base", 10000.0)
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &merges)
        .unsigned("tokenizer.ggml.eos_token_id", 261)
        .string(
            "tokenizer.chat_template",
            "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        )
        .weights("token_embd.weight", &[262, 8])
        .weights("output_norm.weight", &[8])
        .weights("blk.0.attn_norm.weight", &[8])
        .weights("blk.0.attn_q.weight", &[8, 8])
        .weights("blk.0.attn_k.weight", &[4, 8])
        .weights("blk.0.attn_v.weight", &[4, 8])
        .weights("blk.0.attn_output.weight", &[8, 8])
        .weights("blk.0.ffn_norm.weight", &[8])
        .weights("blk.0.ffn_gate.weight", &[16, 8])
        .weights("blk.0.ffn_up.weight", &[16, 8])
        .weights("blk.0.ffn_down.weight", &[8, 16])
}

/// Returns a complete llama model in Q8_0 with two layers: width 64, 4 heads over 2 KV heads.
pub(crate) fn quantized_llama(feed_forward: usize) -> GgufWriter {
    let mut writer = tiny_llama();
    writer.tensors.clear();
    let mut writer = writer
        .unsigned("llama.embedding_length", 64)
        .unsigned("llama.block_count", 2)
        .unsigned("llama.feed_forward_length", feed_forward as u32)
        .unsigned("llama.attention.head_count", 4)
        .unsigned("llama.attention.head_count_kv", 2)
        .quantized("token_embd.weight", [262, 64])
        .weights("output_norm.weight", &[64]);
    for layer in 0..2 {
        for norm in ["attn_norm", "ffn_norm"] {
            writer = writer.weights(&format!("blk.{layer}.{norm}.weight"), &[64]);
        }
        for (name, rows, columns) in [
            ("attn_q", 64, 64),
            ("attn_k", 32, 64),
            ("attn_v", 32, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", feed_forward, 64),
            ("ffn_up", feed_forward, 64),
            ("ffn_down", 64, feed_forward),
        ] {
            writer = writer.quantized(&format!("blk.{layer}.{name}.weight"), [rows, columns]);
        }
    }
    writer
}

fn string_bytes(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}
