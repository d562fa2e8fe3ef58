//! `skep model status`: shows the models of a running host.

use anyhow::Result;
use skep_api::{Model, ModelDetails, SamplingDefaults};

use crate::commands::{HostArgs, out};

/// Show the models of a running host: whether they are loaded, their aliases, and their sampling defaults
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model status
  skep model status --json | jq -r '.[] | select(.skep.state == \"loaded\") | .id'")]
pub struct Args {
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the models of the host.
pub async fn run(args: Args) -> Result<()> {
    print(&args.host.client()?.models().await?, args.json)
}

/// Prints models, one in each line.
pub(super) fn print(models: &[Model], as_json: bool) -> Result<()> {
    if as_json {
        return out::json(&models);
    }
    models.iter().try_for_each(|model| out::line(&line(model)))
}

fn line(model: &Model) -> String {
    let Some(details) = &model.skep else { return model.id.clone() };
    let ModelDetails { state, message, percent, is_default, aliases, hosts, sampling, markup, .. } = details;
    let mut parts = vec![state.clone()];
    if let Some(message) = message {
        let percent = percent.map(|percent| format!(" {percent} %")).unwrap_or_default();
        parts.push(format!("{message}{percent}"));
    }
    if *is_default {
        parts.push("default".to_owned());
    }
    if !aliases.is_empty() {
        parts.push(format!("aliases {}", aliases.join(" ")));
    }
    if !hosts.is_empty() {
        let numbers: Vec<String> = hosts.iter().map(i64::to_string).collect();
        parts.push(format!("at hosts {}", numbers.join(" ")));
    }
    if let Some(context) = model.context_length {
        parts.push(format!("context {context}"));
    }
    if let Some(markup) = markup {
        parts.push(format!("markup {markup}"));
    }
    if let Some(SamplingDefaults { temperature, top_p, .. }) = sampling {
        parts.push(format!("temperature {temperature}, top_p {top_p}"));
    }
    format!("{}  {}", model.id, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_what_is_known() {
        let model: Model = serde_json::from_value(serde_json::json!({
            "id": "big", "object": "model", "created": 0, "owned_by": "skep",
            "skep": {"state": "loading", "message": "reading", "percent": 40, "is_default": true, "aliases": ["a", "b"]}
        }))
        .expect("valid");
        assert_eq!(line(&model), "big  loading, reading 40 %, default, aliases a b");
        let model: Model = serde_json::from_value(serde_json::json!({
            "id": "far", "object": "model", "created": 0, "owned_by": "skep", "context_length": 64,
            "skep": {"state": "remote", "is_default": false, "aliases": [], "location": "cluster", "hosts": [2, 5]}
        }))
        .expect("valid");
        assert_eq!(line(&model), "far  remote, at hosts 2 5, context 64");
    }
}
