//! The flags of `skep up` as settings, so that the host can show which settings do not come from the file.

use clap::ValueEnum as _;

use super::Args;
use crate::config::AuthFlag;
use crate::file_settings::FileSettings;
use crate::model_options::ModelOptions;

/// Replaces the settings that flags override. `models` are those that the flag `--model` names.
pub(super) fn apply(args: &Args, models: &[ModelOptions], written: &mut FileSettings) {
    let text = |value: &dyn std::fmt::Display| format!("{:?}", value.to_string());
    let number = |value: &dyn std::fmt::Display| value.to_string();
    let compute = &args.compute;
    let speculation = args.speculation.and_then(|how| Some(how.to_possible_value()?.get_name().to_owned()));
    let data = args.data.as_ref().map(|data| data.display().to_string());
    let is_required = args.access.auth.map(|auth| auth == AuthFlag::Required);
    let device = compute.device;
    let cluster = &args.storage.cluster;
    let key_file = cluster.cluster_key_file.as_ref().map(|file| file.display().to_string());
    let role = cluster.role.and_then(|role| Some(role.to_possible_value()?.get_name().to_owned()));
    let flags = [
        (None, "listen", "--listen", args.listen.map(|value| text(&value))),
        (None, "data", "--data", data.map(|value| text(&value))),
        (None, "data", "--ephemeral", args.ephemeral.then(|| text(&"in memory"))),
        (None, "database", "--database", args.storage.database.database.as_ref().map(|value| text(value))),
        (None, "standby", "--standby", args.storage.standby.then(|| number(&true))),
        (Some("cluster"), "enabled", "--cluster", cluster.cluster.then(|| number(&true))),
        (Some("cluster"), "url", "--cluster-url", cluster.cluster_url.as_ref().map(|value| text(value))),
        (Some("cluster"), "key_file", "--cluster-key-file", key_file.map(|value| text(&value))),
        (Some("cluster"), "role", "--role", role.map(|value| text(&value))),
        (None, "device", "--device", device.device.map(|value| text(&value))),
        (None, "deterministic", "--deterministic", device.deterministic.map(|value| number(&value))),
        (None, "threads", "--threads", args.threads.map(|value| number(&value))),
        (Some("engine"), "replicas", "--replicas", args.replicas.map(|value| number(&value))),
        (Some("engine"), "speculation", "--speculation", speculation.map(|value| text(&value))),
        (Some("engine"), "tensor_parallel", "--tp", args.load.tp.map(|value| number(&value))),
        (Some("engine"), "pipeline_parallel", "--pp", args.load.pp.map(|value| number(&value))),
        (Some("engine"), "weights", "--weights", args.load.weights.map(|value| text(&value))),
        (Some("engine"), "isa", "--isa", compute.isa.map(|value| text(&value))),
        (Some("engine"), "kv", "--kv", compute.kv.map(|value| text(&value))),
        (Some("engine"), "gpu_memory", "--gpu-memory", compute.gpu_memory.map(|value| number(&value))),
        (Some("engine"), "activations", "--activations", compute.activations.map(|value| text(&value))),
        (Some("kv"), "disk_gb", "--kv-disk-gb", args.storage.kv_disk.kv_disk_gb.map(|value| number(&value))),
        (Some("engine"), "pin_threads", "--pin", compute.pin.then(|| number(&true))),
        (Some("http"), "console", "--no-ui", args.access.no_ui.then(|| number(&false))),
        (Some("auth"), "required", "--auth", is_required.map(|value| number(&value))),
        (
            Some("telemetry"),
            "otlp_endpoint",
            "--otlp-endpoint",
            args.otlp_endpoint.as_ref().map(|_| text(&"set by the flag")),
        ),
    ];
    for (section, key, flag, value) in flags {
        if let Some(value) = value {
            written.set_flag(section, key, &value, flag);
        }
    }
    if !args.models.is_empty() {
        let entries: Vec<String> =
            models.iter().map(|model| model.name.clone().unwrap_or_else(|| model.source.clone())).collect();
        written.keep_entries("model", &entries);
        written.set_flag(None, "model", &format!("{:?}", args.models), "--model");
    }
}
