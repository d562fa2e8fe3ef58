//! Tests with whole models: valid ones of both formats, and unsupported ones.

use serde_json::{Value, json};

use super::coded::tests::fixture;
use super::*;
use crate::config::{Architecture, RopePairing, RopeScaling};
use crate::gguf::writer::{GgufWriter, tiny_llama};
use crate::tokenizer::SpecialTokens;

const ORIGINAL_CONTEXT: &str = "llama.rope.scaling.original_context_length";

fn open_bytes(file: &[u8], name: &str) -> (tempfile::TempDir, Result<Checkpoint, ModelError>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, file).unwrap();
    let opened = Checkpoint::open(&path);
    (folder, opened)
}

fn open_gguf(writer: &GgufWriter) -> Result<Checkpoint, ModelError> {
    open_bytes(&writer.build(), "tiny.gguf").1
}

/// Opens the llama-gqa fixture with some keys of its config.json replaced; null removes a key.
fn open_changed(changes: Value) -> Result<Checkpoint, ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("llama-gqa");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    Checkpoint::open(folder.path())
}

#[test]
fn tiny_models_of_every_architecture_open_with_their_flags() {
    let open = |name: &str| Checkpoint::open(&fixture(name)).unwrap();
    let llama = open("llama-gqa");
    assert_eq!(llama.config().architecture, Architecture::Llama);
    assert_eq!(
        (llama.config().head_count, llama.config().kv_head_count, llama.config().head_size),
        (4, 2, 16)
    );
    assert_eq!((llama.config().bos, llama.config().eos.as_slice()), (Some(1), &[2][..]));
    assert_eq!(llama.config().rope.pairing, RopePairing::Halves);
    assert!(!llama.config().tied_head && llama.has("lm_head.weight"));
    let tied = open("llama-tied-rope3");
    assert!(tied.config().tied_head);
    assert!(matches!(tied.config().rope.scaling, RopeScaling::Llama3 { original_context: 64, .. }));
    let qwen2 = open("qwen2-bias");
    assert!(qwen2.config().qkv_bias && !qwen2.config().output_bias);
    assert_eq!(qwen2.config().windows, [None; 3]);
    let qwen3 = open("qwen3-qknorm");
    assert!(qwen3.config().qk_norm);
    assert_eq!(qwen3.config().head_size, 24);
    let mistral = open("mistral-window");
    assert_eq!(mistral.config().windows, [Some(16); 3]);
    assert_eq!(mistral.tensor("model.norm.weight").unwrap().shape, [64]);
    assert_eq!(mistral.tensors().count(), 3 + 3 * 9);
    assert!(mistral.tokenizer().unwrap().is_none() && mistral.chat_template().unwrap().is_none());
    assert_eq!(Checkpoint::open(&fixture("llama-gqa/model.safetensors")).unwrap().config(), llama.config());
}

#[test]
fn the_files_of_vocabularies_that_are_read_are_those_that_are_listed() {
    let byte_level = std::fs::read(fixture("../tokenizer/byte-level-chatml.json")).unwrap();
    // Each rank is a token in Base64, and these tokens are single bytes.
    let letters: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['+', '/']).collect();
    let letter = |bits: u8| letters[usize::from(bits)];
    let ranks: String = (0..=u8::MAX)
        .map(|byte| format!("{}{}== {byte}\n", letter(byte >> 2), letter((byte & 3) << 4)))
        .collect();
    for (name, content) in [
        ("tokenizer.json", &byte_level[..]),
        ("tiktoken.model", ranks.as_bytes()),
        ("tokenizer.model", b"\x0a\x05\x0a\x01a"),
        ("vocab.json", b"{\"a\": 0}"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(fixture("llama-gqa").join(file), folder.path().join(file)).unwrap();
        }
        std::fs::write(folder.path().join(name), content).unwrap();
        let is_read = !matches!(Checkpoint::open(folder.path()).unwrap().tokenizer(), Ok(None));
        assert_eq!(reads_vocabulary_file(name), is_read, "{name}");
    }
}

#[test]
fn a_gguf_model_opens_with_hugging_face_tensor_names() {
    let checkpoint = open_gguf(&tiny_llama()).unwrap();
    let config = checkpoint.config();
    assert_eq!(config.rope.pairing, RopePairing::Interleaved);
    assert!(config.tied_head && !config.add_bos);
    assert_eq!(config.eos, [260, 261], "the end-of-document token must end a generation too");
    let k = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight").unwrap();
    assert_eq!((k.dtype, k.shape, k.data.len()), (DType::F32, &[4, 8][..], 128));
    let tokenizer = checkpoint.tokenizer().unwrap().unwrap();
    let ids = tokenizer.encode("hello 42<|im_end|>", SpecialTokens::Parse).unwrap();
    assert_eq!((ids[0], ids.last()), (259, Some(&261)));
    assert_eq!(tokenizer.decode(&ids, true), "hello 42");
    let literal = tokenizer.encode("<|im_end|>", SpecialTokens::Literal).unwrap();
    assert_eq!(literal.len(), "<|im_end|>".len());
    let template = checkpoint.chat_template().unwrap().unwrap();
    assert_eq!(template.render(&[json!({"content": "x"})], None, false).unwrap(), "x<|im_end|>");
    let before = checkpoint.tensor("model.norm.weight").unwrap().data.to_vec();
    checkpoint.release("model.norm.weight");
    assert_eq!(checkpoint.tensor("model.norm.weight").unwrap().data, before, "released pages must come back");
}

#[test]
fn variants_of_gguf_models_set_their_flags() {
    let windowed = open_gguf(&tiny_llama().unsigned("llama.attention.sliding_window", 16)).unwrap();
    assert_eq!(
        (windowed.config().architecture, windowed.config().windows[0]),
        (Architecture::Mistral, Some(16))
    );
    let factors =
        tiny_llama().tensor("rope_freqs.weight", &[2], 0, [1f32.to_le_bytes(), 8f32.to_le_bytes()].concat());
    assert_eq!(open_gguf(&factors).unwrap().config().rope.scaling, RopeScaling::Factors(vec![1.0, 8.0]));
    let linear =
        tiny_llama().string("llama.rope.scaling.type", "linear").float("llama.rope.scaling.factor", 4.0);
    assert_eq!(open_gguf(&linear).unwrap().config().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let yarn = tiny_llama()
        .string("llama.rope.scaling.type", "yarn")
        .float("llama.rope.scaling.factor", 4.0)
        .unsigned(ORIGINAL_CONTEXT, 64);
    let scaling = open_gguf(&yarn).unwrap().config().rope.scaling.clone();
    // The same model in the other format.
    let rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let expected = open_changed(json!({"rope_parameters": null, "rope_scaling": rope})).unwrap();
    assert_eq!(scaling, expected.config().rope.scaling);
    assert!(matches!(scaling, RopeScaling::Yarn { truncated: true, original_context: 64, .. }));
    let magnitude = |writer: &GgufWriter| match open_gguf(writer).unwrap().config().rope.scaling {
        RopeScaling::Yarn { magnitude, .. } => magnitude,
        ref other => panic!("{other:?}"),
    };
    assert!(magnitude(&yarn) > 1.1);
    let balanced = yarn.float("llama.rope.scaling.yarn_log_multiplier", 1.0);
    assert_eq!(magnitude(&balanced), 1.0, "the magnitude of all dimensions cancels that of the rotated ones");
    let headed = open_gguf(&tiny_llama().weights("output.weight", &[262, 8])).unwrap();
    assert!(!headed.config().tied_head);
}

#[test]
fn rejects_unsupported_or_invalid_gguf_models_and_names_the_cause() {
    let nan = [1f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat();
    let cases = [
        (tiny_llama().string("general.architecture", "mamba"), "general.architecture"),
        (tiny_llama().without("general.architecture"), "general.architecture"),
        (tiny_llama().unsigned("llama.expert_count", 8), "llama.expert_used_count"),
        (
            tiny_llama().string("llama.rope.scaling.type", "yarn").float("llama.rope.scaling.factor", 2.0),
            "llama.rope.scaling.original_context_length",
        ),
        (
            tiny_llama().string("llama.rope.scaling.type", "yarn").unsigned(ORIGINAL_CONTEXT, 64),
            "llama.rope.scaling.factor",
        ),
        (
            tiny_llama()
                .string("llama.rope.scaling.type", "yarn")
                .float("llama.rope.scaling.factor", 2.0)
                .tensor("rope_freqs.weight", &[2], 0, [1f32.to_le_bytes(), 8f32.to_le_bytes()].concat()),
            "rope_freqs.weight",
        ),
        (
            tiny_llama()
                .string("llama.rope.scaling.type", "longrope")
                .float("llama.rope.scaling.factor", 2.0),
            "longrope",
        ),
        (tiny_llama().unsigned("llama.rope.dimension_count", 2), "llama.rope.dimension_count"),
        (tiny_llama().float("llama.attention.temperature_scale", 0.1), "llama.attention.temperature_scale"),
        (tiny_llama().unsigned("llama.block_count", 2), "model.layers.1."),
        (tiny_llama().unsigned("llama.block_count", u32::MAX), "num_hidden_layers"),
        (tiny_llama().unsigned("llama.block_count", 0), "num_hidden_layers"),
        (tiny_llama().unsigned("llama.attention.head_count", 0), "head"),
        (tiny_llama().unsigned("llama.attention.head_count_kv", 3), "num_key_value_heads"),
        (tiny_llama().unsigned("llama.embedding_length", 16), "model.embed_tokens.weight"),
        (tiny_llama().unsigned("llama.context_length", 0), "max_position_embeddings"),
        (tiny_llama().float("llama.attention.layer_norm_rms_epsilon", f32::NAN), "rms_norm_eps"),
        (tiny_llama().float("llama.rope.freq_base", f32::INFINITY), "rope_theta"),
        (tiny_llama().string("llama.block_count", "one"), "llama.block_count"),
        (tiny_llama().unsigned("tokenizer.ggml.eos_token_id", 262), "eos_token_id"),
        (tiny_llama().tensor("rope_freqs.weight", &[2], 0, nan), "rope_freqs.weight"),
        (tiny_llama().without("blk.0.ffn_up.weight"), "mlp.up_proj.weight"),
        (tiny_llama().without("token_embd.weight"), "token_embd.weight"),
        (tiny_llama().weights("blk.0.attn_qkv.weight", &[8, 8]), "blk.0.attn_qkv.weight"),
        (tiny_llama().weights("blk.7.attn_q.weight", &[8, 8]), "model.layers.7."),
    ];
    for (writer, words) in cases {
        let message = open_gguf(&writer).expect_err(words).to_string();
        assert!(message.contains(words), "{message} does not contain {words}");
    }
    let tokenizer =
        |writer: GgufWriter| open_gguf(&writer).unwrap().tokenizer().expect_err("unsupported").to_string();
    assert!(tokenizer(tiny_llama().string("tokenizer.ggml.pre", "klingon")).contains("tokenizer.ggml.pre"));
    assert!(tokenizer(tiny_llama().string("tokenizer.ggml.model", "bert")).contains("tokenizer.ggml.model"));
    assert!(tokenizer(tiny_llama().without("tokenizer.ggml.merges")).contains("tokenizer.ggml.merges"));
}

#[test]
fn rejects_unsupported_or_invalid_configs_and_names_the_key() {
    let cases = [
        (json!({"model_type": "mamba"}), "model_type"),
        (json!({"model_type": 3}), "model_type"),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "architectures"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"quantization_config": {"quant_method": "bitsandbytes"}}), "quantization_config"),
        (json!({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}), "rope_parameters.rope_type"),
        (
            json!({"rope_parameters": null, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "rope_scaling.rope_type",
        ),
        (json!({"rope_parameters": {"rope_type": "linear"}}), "rope_parameters.factor"),
        (json!({"rope_parameters": {"rope_type": "linear", "factor": -1}}), "factor"),
        (json!({"rope_parameters": []}), "rope_parameters"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"hidden_size": null}), "hidden_size"),
        (json!({"hidden_size": 1u64 << 40}), "hidden_size"),
        (json!({"hidden_size": 1 << 21}), "hidden_size"),
        (json!({"hidden_size": -64}), "hidden_size"),
        (json!({"num_attention_heads": 0, "head_dim": null}), "head"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"head_dim": 15}), "head_dim"),
        (json!({"head_dim": 8}), "q_proj"),
        (json!({"vocab_size": 1u64 << 31}), "vocab_size"),
        (json!({"vocab_size": 321}), "model.embed_tokens.weight"),
        (json!({"num_hidden_layers": 4}), "model.layers.3."),
        (json!({"num_hidden_layers": 2}), "model.layers.2."),
        (json!({"num_hidden_layers": 4_000_000_000u64}), "num_hidden_layers"),
        (json!({"rms_norm_eps": "small"}), "rms_norm_eps"),
        (json!({"rms_norm_eps": 1e300}), "rms_norm_eps"),
        (json!({"attention_bias": true}), "q_proj.bias"),
        (json!({"eos_token_id": [2, 320]}), "eos_token_id"),
        (json!({"eos_token_id": "</s>"}), "eos_token_id"),
    ];
    for (changes, words) in cases {
        let message = open_changed(changes.clone()).expect_err(&changes.to_string()).to_string();
        assert!(message.contains(words), "{changes}: {message}");
    }
}

#[test]
fn reads_old_spellings_and_lists_of_end_tokens() {
    let old = json!({"rope_parameters": null, "rope_theta": 500000.0, "eos_token_id": [2, 7, 2],
        "rope_scaling": {"type": "linear", "factor": 2.0}});
    let checkpoint = open_changed(old).unwrap();
    assert_eq!(checkpoint.config().rope.theta, 500000.0);
    assert_eq!(checkpoint.config().rope.scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(checkpoint.config().eos, [2, 7]);
    let silent = open_changed(json!({"tie_word_embeddings": null})).unwrap();
    assert!(!silent.config().tied_head, "a file with a head must not tie it");
}

/// An answer of gpt-oss begins with a message that holds its reasoning and ends with `<|end|>`.
#[test]
fn the_end_of_a_message_in_harmony_does_not_end_a_generation() {
    let texts = ["<|endoftext|>", "<|return|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"];
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama-gqa").join(name), folder.path().join(name)).unwrap();
    }
    let added: Vec<Value> = (10..)
        .zip(texts)
        .map(|(id, text)| json!({"id": id, "content": text, "special": true, "single_word": false}))
        .collect();
    let ends_of = |added: &[Value], generation: Value| {
        let tokenizer = json!({"added_tokens": added, "model": {"type": "BPE"}});
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        std::fs::write(folder.path().join("generation_config.json"), generation.to_string()).unwrap();
        Checkpoint::open(folder.path()).unwrap().config().eos.clone()
    };
    let [endoftext, return_, end, call] = [10, 11, 14, 15];
    // The token 2 is the one that config.json names.
    assert_eq!(ends_of(&added, json!({"eos_token_id": [return_]})), [2, endoftext, return_, call]);
    assert_eq!(ends_of(&added, json!({"eos_token_id": [end]})), [2, endoftext, return_, call]);
    assert_eq!(ends_of(&added[4..5], json!({})), [2, end], "in other vocabularies it ends a turn");

    let mut tokens: Vec<String> =
        crate::tokenizer::byte_level_characters().iter().map(char::to_string).collect();
    tokens.extend(texts.map(str::to_owned));
    let mut types = vec![1; tokens.len() - texts.len()];
    types.extend([3; 6]);
    let file = tiny_llama()
        .strings("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &types)
        .unsigned("tokenizer.ggml.eos_token_id", 257)
        .unsigned("tokenizer.ggml.eot_token_id", 260);
    assert_eq!(open_gguf(&file).unwrap().config().eos, [256, 257, 261]);
}

#[test]
fn files_next_to_the_weights_add_end_tokens_bos_and_a_template() {
    let folder = tempfile::tempdir().unwrap();
    let write =
        |name: &str, value: Value| std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama-gqa").join(name), folder.path().join(name)).unwrap();
    }
    let token = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false})
    };
    write("generation_config.json", json!({"eos_token_id": [2, 5]}));
    write(
        "tokenizer.json",
        json!({"version": "1.0", "added_tokens": [token(0, "<s>"), token(1, "<|im_end|>")],
            "post_processor": {"type": "Sequence", "processors": [{"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}]},
            "model": {"type": "BPE", "vocab": {"<s>": 0, "<|im_end|>": 1, "a": 2}, "merges": []}}),
    );
    let templates =
        json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}!"}]);
    write("tokenizer_config.json", json!({"bos_token": {"content": "<s>"}, "chat_template": templates}));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config().eos, [1, 2, 5]);
    assert!(checkpoint.config().add_bos);
    assert_eq!(checkpoint.chat_template().unwrap().unwrap().render(&[], None, false).unwrap(), "<s>!");
    let tokenizer = checkpoint.tokenizer().unwrap().unwrap();
    assert_eq!(tokenizer.encode("a", SpecialTokens::Parse).unwrap(), [2], "encoding must not add BOS");
    std::fs::write(folder.path().join("chat_template.jinja"), "first").unwrap();
    assert_eq!(checkpoint.chat_template().unwrap().unwrap().source(), "first");
}

/// Kimi's files: a configuration around that of the text part, tokens in tiktoken.model, and added tokens by their ids.
#[test]
fn a_model_with_tiktoken_ranks_has_the_end_tokens_of_all_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    let source = fixture("kimi-k2-int4");
    let mut text: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for key in ["bos_token_id", "eos_token_id"] {
        text.as_object_mut().unwrap().remove(key);
    }
    let config = json!({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text, "bos_token_id": 256, "eos_token_id": 257});
    write("config.json", config.to_string());
    std::fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    write("generation_config.json", json!({"eos_token_id": 259}).to_string());
    let listed = json!({"256": {"content": "[BOS]", "special": true}, "257": {"content": "[EOS]", "special": true},
        "258": {"content": "<|im_end|>", "special": true}, "260": {"content": "<think>", "special": false}});
    let tokenizer = json!({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed,
        "eos_token": "[EOS]", "bos_token": "[BOS]"});
    write("tokenizer_config.json", tokenizer.to_string());
    use base64::Engine;
    let spelled = |byte: u8| base64::engine::general_purpose::STANDARD.encode([byte]);
    write("tiktoken.model", (0..=255u8).map(|byte| format!("{} {byte}\n", spelled(byte))).collect());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.config().bos, Some(256));
    assert_eq!(checkpoint.config().eos, [257, 258, 259]);
    assert!(!checkpoint.config().add_bos);
    let tokenizer = checkpoint.tokenizer().unwrap().unwrap();
    assert_eq!(tokenizer.encode("[BOS]a<think>", SpecialTokens::Parse).unwrap(), [256, 97, 260]);
    write("tokenizer_config.json", json!({"tokenizer_class": "Qwen2Tokenizer"}).to_string());
    let message = Checkpoint::open(folder.path()).unwrap().tokenizer().unwrap_err().to_string();
    assert!(message.contains("tiktoken.model") && message.contains("Qwen2Tokenizer"), "{message}");
}

#[test]
fn opens_sharded_weights_and_rejects_index_paths_outside_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("llama-gqa");
    std::fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let name = format!("model-0000{part}.safetensors");
        let tensors: Vec<_> = whole.iter().filter(|(name, _)| name.len() % 2 == part).collect();
        map.extend(tensors.iter().map(|(tensor, _)| ((*tensor).to_owned(), json!(name))));
        std::fs::write(folder.path().join(&name), safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
    let write_index = |map: &serde_json::Map<String, Value>| {
        let path = folder.path().join("model.safetensors.index.json");
        std::fs::write(path, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    };
    write_index(&map);
    let sharded = Checkpoint::open(folder.path()).unwrap();
    let single = Checkpoint::open(&source).unwrap();
    assert_eq!(sharded.config(), single.config());
    for tensor in single.tensors() {
        assert_eq!(sharded.tensor(tensor.name).unwrap().data, tensor.data, "{}", tensor.name);
    }
    let with = |name: &str, file: &str| {
        let mut map = map.clone();
        map.insert(name.to_owned(), json!(file));
        write_index(&map);
        Checkpoint::open(folder.path()).expect_err("the index must be rejected").to_string()
    };
    assert!(with("x", "../model.safetensors").contains("not in its folder"));
    assert!(with("x", "/etc/passwd").contains("not in its folder"));
    assert!(with("x", "model-00000.safetensors").contains("`x`"));
    assert!(with("x", "absent.safetensors").contains("absent.safetensors"));
}

#[test]
fn paths_without_a_model_report_why() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| Checkpoint::open(path).expect_err("the path must be rejected").to_string();
    assert!(message(folder.path()).contains("neither config.json nor a GGUF file"));
    assert!(message(&folder.path().join("absent")).contains("absent"));
    std::fs::write(folder.path().join("a.gguf"), tiny_llama().build()).unwrap();
    assert!(Checkpoint::open(folder.path()).is_ok());
    std::fs::write(folder.path().join("b.gguf"), "").unwrap();
    assert!(message(folder.path()).contains("2 GGUF files"));
    assert!(message(&folder.path().join("b.gguf")).contains("empty"));
    std::fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    assert!(message(folder.path()).contains("config.json"));
}
