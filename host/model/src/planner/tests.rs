//! Compares the planner with published models, and its plans with those of the executors.

use std::path::PathBuf;

use serde_json::Value;

use super::description::ModelPart;
use super::*;
use crate::batch::PAGE_TOKENS;
use crate::checkpoint::fixtures::tiny_models;
use crate::executor::estimate::cpu_plan;
use crate::executor::{ExecutorOptions, KvDtype};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

fn described(name: &str) -> Description {
    let text = std::fs::read(fixtures().join("configs").join(format!("{name}.json"))).unwrap();
    Description::from_config(&text).unwrap()
}

fn plan(name: &str, devices: &str, context: usize) -> Plan {
    let devices = devices.parse().unwrap();
    described(name).plan(&Request { devices, context, sequences: 1, kv: KvDtype::F16 }).unwrap()
}

#[test]
fn parameters_are_the_published_ones() {
    // Billions of parameters, in all and of a token, as published with the models.
    for (name, published, active) in [
        ("deepseek-v3", 671.0, 37.0),
        ("deepseek-v2-lite", 15.7, 2.4),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("mixtral-8x7b", 46.7, 12.9),
        ("gpt-oss-20b", 20.9, 3.6),
        ("llama-4-scout", 108.6, 17.0),
        ("gemma-3-4b", 4.3, 3.9),
        ("llama-3.1-8b", 8.03, 7.5),
    ] {
        let totals = described(name).totals();
        let (all, per_token) = (totals.parameters as f64 / 1e9, totals.active_parameters as f64 / 1e9);
        println!(
            "{name}: {all:.3} B, {per_token:.3} B active, {:.2} GB",
            totals.checkpoint_bytes as f64 / 1e9
        );
        assert!((all / published - 1.0).abs() < 0.005, "{name}: {all} B instead of {published} B");
        // Some count the table of tokens among the active parameters, of which a token reads one row.
        assert!((per_token / active - 1.0).abs() < 0.1, "{name}: {per_token} B instead of {active} B");
    }
    // 30 billion are published for this one, of which 3 are active, both rounded.
    let flash = described("glm-4.7-flash").totals();
    assert!((29.5e9..30.5e9).contains(&(flash.parameters as f64)), "{flash:?}");
    assert!((3e9..4e9).contains(&(flash.active_parameters as f64)), "{flash:?}");
    // 106 billion is published for this one, rounded down.
    let glm = described("glm-4.5-air").totals();
    assert!((106e9..107e9).contains(&(glm.parameters as f64)), "{glm:?}");
}

#[test]
fn kimi_in_int4_takes_595_gb_and_70_272_bytes_a_token() {
    let kimi = described("kimi-k2.5");
    let totals = kimi.totals();
    // The sum of the tensors: 384 experts in 60 of 61 layers. Moonshot rounds it to 1.04 trillion.
    assert!((1.026e12..1.028e12).contains(&(totals.parameters as f64)), "{totals:?}");
    assert!((31e9..33e9).contains(&(totals.active_parameters as f64)), "{totals:?}");
    assert!((totals.checkpoint_bytes as f64 / 595e9 - 1.0).abs() < 0.01, "{totals:?}");
    assert_eq!(kimi.kv_bytes_per_token(KvDtype::F16), 70_272);
    assert_eq!(kimi.kv_bytes_per_token(KvDtype::I8), 61 * (512 + 4 * 4 + 2 * 64));
    // 11.9 GB of routed experts, 12.3 of attention, 5.3 shared, 0.8 dense, 2.35 of the head.
    let read = kimi.decode_bytes_per_token(1, KvDtype::F16) as f64;
    assert!((32.4e9..33.0e9).contains(&read), "{read}");
    let long = kimi.decode_bytes_per_token(262_144, KvDtype::F16) as f64 - read;
    assert!((18.3e9..18.5e9).contains(&long), "{long}");
    println!("{totals:?}, {read} bytes a token");
    // The text part runs on the CPU, and the vision tower is left out.
    assert_eq!(kimi.obstacle(), None);
    let on_cuda = kimi.obstacle_on(&"8xH200".parse().unwrap());
    assert!(on_cuda.as_ref().is_some_and(|reason| reason.contains("latent attention")), "{on_cuda:?}");
    assert!(kimi.notes.iter().any(|note| note.contains("the text part")), "{:?}", kimi.notes);
    let parts = kimi.parts().join("; ");
    for part in
        ["latent attention (512 + 64", "384 routed experts and shared", "4 bits in groups of 32", "vision"]
    {
        assert!(parts.contains(part), "{part}: {parts}");
    }
}

/// Plans on the CPU are exact, as tests of tiny models show, and grow with the number of layers and of experts. So a few of them say
/// how much memory all of them take.
#[test]
fn the_plan_of_kimi_on_eight_devices_is_what_its_first_layers_take_scaled_up() {
    let text = std::fs::read(fixtures().join("configs/kimi-k2.5.json")).unwrap();
    let whole: Value = serde_json::from_slice(&text).unwrap();
    let options = ExecutorOptions { tensor_parallel: 8, kv: KvDtype::F16, ..ExecutorOptions::default() };
    let planned = |layers: u64, experts: u64| {
        let mut config = whole.clone();
        config["text_config"]["num_hidden_layers"] = layers.into();
        config["text_config"]["n_routed_experts"] = experts.into();
        let cut = Description::from_config(config.to_string().as_bytes()).unwrap();
        cpu_plan(cut.runnable.as_ref().unwrap(), &options).unwrap()
    };
    let weights = |layers: u64, experts: u64| planned(layers, experts).memory.weight_bytes;
    // The first layer has no experts.
    let (two, three) = (weights(2, 16), weights(3, 16));
    let (layer, expert) = (three - two, (weights(2, 32) - two) / 16);
    let scaled =
        |layers: u64, experts: u64| two + (layers - 2) * layer + (layers - 1) * (experts - 16) * expert;
    assert_eq!(weights(4, 48), scaled(4, 48));
    let kimi = described("kimi-k2.5");
    let plan = plan("kimi-k2.5", "8xH200", 131_072);
    let layout =
        plan.layouts.iter().find(|layout| (layout.tensor_parallel, layout.expert_parallel) == (8, 1));
    let vision = kimi.weights.iter().filter(|weight| weight.model_part == ModelPart::Vision);
    let vision: u64 = vision.map(|weight| weight.bytes).sum();
    let on_devices = 8 * (layout.unwrap().device.weight_bytes - vision);
    let (on_devices, scaled) = (on_devices as f64, scaled(61, 384) as f64);
    println!("{on_devices} bytes planned, {scaled} bytes scaled up");
    // Executors on the CPU keep norms and routers in F32.
    assert!((on_devices / scaled - 1.0).abs() < 0.01, "{on_devices} {scaled}");
    // A page of all ranks: each keeps the latents of every layer.
    let pages = planned(2, 16).page_bytes;
    assert_eq!(pages / 2 * 61, 8 * PAGE_TOKENS as u64 * kimi.kv_bytes_per_token(KvDtype::F16));
}

/// The kernels read each tile of an active matrix once a step, which their own tests count, so a step reads what its weights take.
#[test]
fn the_weights_of_a_token_take_hardly_more_memory_than_in_their_files() {
    for name in ["qwen3-30b-a3b", "glm-4.7-flash", "gpt-oss-20b", "deepseek-v3", "kimi-k2.5"] {
        let model = described(name);
        let plan = cpu_plan(model.runnable.as_ref().unwrap(), &ExecutorOptions::default()).unwrap();
        let vision = model.weights.iter().filter(|weight| weight.model_part == ModelPart::Vision);
        let files = model.totals().checkpoint_bytes - vision.map(|weight| weight.bytes).sum::<u64>();
        // Every token reads what memory has beyond the files: F32 for routers and norms, and scales of smaller blocks of FP8.
        let added = plan.memory.weight_bytes as f64 - files as f64;
        let active = model.decode_bytes_per_token(0, KvDtype::F16) as f64;
        let share = match name {
            // Those of the experts that a token does not choose are not read.
            "deepseek-v3" => active / files as f64,
            _ => 1.0,
        };
        let times = 1.0 + added * share / active;
        println!("{name}: {times:.3} times {:.1} GB", active / 1e9);
        assert!((0.99..1.15).contains(&times), "{name}: {times}");
    }
}

#[test]
fn a_latent_is_kept_by_every_tensor_parallel_rank_and_divided_by_stages() {
    let plan = plan("kimi-k2.5", "8xH200", 131_072);
    assert_eq!((plan.layouts.len(), plan.is_exact), (10, false), "{:?}", plan.excluded);
    let of = |tensor, pipeline, expert| {
        let is = |layout: &&LayoutPlan| {
            (layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel)
                == (tensor, pipeline, expert)
        };
        plan.layouts.iter().find(is).unwrap()
    };
    let (wide, deep) = (of(8, 1, 8), of(1, 8, 1));
    for layout in &plan.layouts {
        let all = layout.device.total_bytes() + DRIVER_BYTES;
        assert!(all.abs_diff((139.8 * f64::from(1 << 30)) as u64) < 2, "{layout:?}");
    }
    // Eight ranks keep the same latents, so the room of one rank is the number of tokens.
    assert!(wide.kv_tokens.abs_diff(wide.device.kv_bytes / 70_272) < 128, "{wide:?}");
    assert!(deep.kv_tokens > 5 * wide.kv_tokens, "{wide:?} {deep:?}");
    assert_eq!(of(8, 1, 1).device.weight_bytes, wide.device.weight_bytes);
    assert!(wide.sequences >= 1 && wide.missing_bytes == 0);
    // Published for eight H100: over 30 GiB are left for keys and values.
    let small = self::plan("kimi-k2.5", "8xH100", 65_536);
    for layout in &small.layouts {
        println!("{layout:?}: {:.1} GiB in all", layout.kv_bytes_in_all as f64 / f64::from(1 << 30));
        assert!(layout.kv_bytes_in_all > 30 << 30 && layout.missing_bytes == 0, "{layout:?}");
    }
}

#[test]
fn scout_on_two_h200_leaves_more_than_56_gib_for_keys_and_values() {
    let scout = described("llama-4-scout");
    assert_eq!(scout.windowed_layers(), Some((36, 8192)));
    assert_eq!(scout.kv_bytes_per_token(KvDtype::F16), 48 * 2 * 8 * 128 * 2);
    // Without the pages behind the chunks, 56 GiB hold 1.2 million tokens of one sequence.
    let long = scout.kv_bytes_of_sequence(1_190_000, KvDtype::F16);
    assert!(long < 56 << 30 && scout.kv_bytes_of_sequence(1_210_000, KvDtype::F16) > 56 << 30, "{long}");
    let plan = plan("llama-4-scout", "2xH200", 262_144);
    let layouts: Vec<_> = plan
        .layouts
        .iter()
        .map(|layout| (layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel))
        .collect();
    assert_eq!(layouts, [(2, 1, 1), (2, 1, 2), (1, 2, 1)]);
    for layout in &plan.layouts {
        println!("{layout:?}: {:.1} GiB in all", layout.kv_bytes_in_all as f64 / f64::from(1 << 30));
        assert!(layout.kv_bytes_in_all > 56 << 30, "{layout:?}");
        assert!(layout.missing_bytes == 0 && layout.sequences >= 1, "{layout:?}");
    }
    // A single one cannot hold the weights.
    let single = self::plan("llama-4-scout", "H200", 4096);
    assert!(single.layouts[0].missing_bytes > 60 << 30 && single.layouts[0].kv_tokens == 0);
}

#[test]
fn windows_bound_what_a_long_sequence_keeps_and_reads() {
    for (name, windowed, window) in [("gpt-oss-20b", 12, 128), ("gemma-3-4b", 29, 1024)] {
        let model = described(name);
        assert_eq!(model.windowed_layers(), Some((windowed, window)), "{name}");
        let token = model.kv_bytes_per_token(KvDtype::F16) / model.layer_count() as u64;
        let global = (model.layer_count() - windowed) as u64;
        assert_eq!(
            model.kv_bytes_of_sequence(10_000, KvDtype::F16),
            token * (global * 10_000 + windowed as u64 * window as u64)
        );
    }
    // DeepSeek-V3 has a layer that predicts a further token; it is not loaded.
    let totals = described("deepseek-v3").totals();
    assert!((11e9..13e9).contains(&(totals.draft_bytes as f64)), "{totals:?}");
}

#[test]
fn layouts_that_do_not_divide_are_left_out_with_a_reason() {
    let plan = self::plan("llama-4-scout", "3xH200", 4096);
    assert_eq!(plan.layouts.len(), 1);
    assert!(plan.excluded[0].contains("TP 3: it does not divide the 40 heads"), "{:?}", plan.excluded);
    let deep = self::plan("gpt-oss-20b", "32xL4", 4096);
    assert!(deep.excluded.iter().any(|reason| reason == "PP 32: the model has 24 layers"), "{deep:?}");
    let experts = self::plan("mixtral-8x7b", "16xL4", 4096);
    assert!(experts.excluded.iter().any(|reason| reason.starts_with("EP 16")), "{:?}", experts.excluded);
}

#[test]
fn bad_configurations_and_requests_are_errors_that_name_the_key() {
    let error = |text: &str| Description::from_config(text.as_bytes()).unwrap_err().to_string();
    assert!(error("{").contains("is not JSON") && error("[]").contains("not an object"));
    assert!(error("{}").contains("`model_type`"));
    let unknown = error(r#"{"model_type": "mamba"}"#);
    assert!(unknown.contains("\"mamba\"") && unknown.contains("deepseek_v3"), "{unknown}");
    let text = std::fs::read_to_string(fixtures().join("configs/llama-3.1-8b.json")).unwrap();
    let with = |key: &str, value: &str| {
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config[key] = serde_json::from_str(value).unwrap();
        error(&config.to_string())
    };
    for (key, value) in [
        ("hidden_size", "null"),
        ("hidden_size", "0"),
        ("num_hidden_layers", "1000000"),
        ("vocab_size", "4294967295"),
        ("num_key_value_heads", "5"),
        ("num_attention_heads", "1e30"),
        ("intermediate_size", "-1"),
        ("max_position_embeddings", "\"many\""),
    ] {
        assert!(with(key, value).contains(key), "{key} {value}: {}", with(key, value));
    }
    // The largest sizes that are read do not overflow.
    let huge = r#"{"model_type": "mixtral", "hidden_size": 1048576, "num_attention_heads": 4096, "num_hidden_layers": 1024,
        "intermediate_size": 1048576, "vocab_size": 4194304, "max_position_embeddings": 67108864,
        "num_local_experts": 16384, "num_experts_per_tok": 16384}"#;
    assert!(error(huge).contains("cannot be right"));
    let llama = Description::from_config(text.as_bytes()).unwrap();
    let request = Request { devices: "H100".parse().unwrap(), context: 4096, sequences: 1, kv: KvDtype::F16 };
    let refused = |request: Request| llama.plan(&request).unwrap_err().to_string();
    assert!(refused(Request { context: 1 << 30, ..request.clone() }).contains("131072 tokens"));
    assert!(refused(Request { context: 0, ..request.clone() }).contains("context"));
    assert!(refused(Request { sequences: 0, ..request.clone() }).contains("sequences"));
    assert!(refused(Request { kv: KvDtype::I8, ..request.clone() }).contains("only on the CPU"));
    let fp8 = Request { kv: KvDtype::Fp8, ..request };
    assert!(refused(Request { devices: "cpu:64".parse().unwrap(), ..fp8.clone() }).contains("i8"));
    let error = described("kimi-k2.5").plan(&fp8).unwrap_err().to_string();
    assert!(error.contains("kv") && error.contains("latents"), "{error}");
    // A scale of four bytes for each key and each value of 128.
    assert_eq!(llama.kv_bytes_per_token(KvDtype::Fp8), 32 * 2 * 8 * (128 + 4));
    let pages = |kv| {
        let plan = llama.plan(&Request { kv, ..fp8.clone() }).unwrap();
        plan.layouts[0].kv_tokens
    };
    let [sixteen, eight] = [KvDtype::F16, KvDtype::Fp8].map(pages);
    assert!(eight as f64 > 1.9 * sixteen as f64, "{eight} tokens in fp8, {sixteen} in f16");
}

#[test]
fn a_configuration_describes_the_tensors_that_the_model_has() {
    for name in tiny_models() {
        let folder = fixtures().join("tiny").join(&name);
        let text = std::fs::read(folder.join("config.json")).unwrap();
        let from_config = Description::from_config(&text).unwrap();
        let exact = Description::of_checkpoint(crate::Checkpoint::open(&folder).unwrap());
        // The configurations of some tiny models name a draft layer that their files leave out.
        let totals = |model: &Description| Totals { draft_bytes: 0, ..model.totals() };
        assert_eq!(totals(&from_config), totals(&exact), "{name}");
        assert_eq!(from_config.windowed_layers(), exact.windowed_layers(), "{name}");
        let bytes = |model: &Description| model.decode_bytes_per_token(100, KvDtype::F16);
        assert_eq!(bytes(&from_config), bytes(&exact), "{name}");
        assert!(from_config.obstacle().is_none() && exact.obstacle().is_none());
        // Both are planned by the executors' own functions.
        let request =
            Request { devices: "cpu:1".parse().unwrap(), context: 64, sequences: 1, kv: KvDtype::I8 };
        let layouts =
            [&from_config, &exact].map(|model| format!("{:?}", model.plan(&request).unwrap().layouts));
        assert_eq!(layouts[0], layouts[1], "{name}");
    }
}

#[test]
fn a_model_fits_where_its_plan_does() {
    let llama = described("llama-3.1-8b");
    assert!(llama.fits_into(24 << 30, 4096, KvDtype::F16).unwrap());
    assert!(!llama.fits_into(16 << 30, 4096, KvDtype::F16).unwrap());
    let exact = plan("llama-3.1-8b", "H100", 131_072);
    assert!(exact.is_exact);
    let layout = &exact.layouts[0];
    println!("{layout:?}");
    assert!((15.0e9..17.5e9).contains(&(layout.device.weight_bytes as f64)), "{layout:?}");
    assert_eq!(layout.sequences, layout.kv_tokens / 131_072);
    // One page is for rows that pad a step.
    let page = PAGE_TOKENS as u64;
    assert_eq!(layout.device.kv_bytes / 131_072 / page, layout.kv_tokens / page + 1);
}
