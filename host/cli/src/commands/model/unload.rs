//! `skep model unload`: frees the memory of a model of a running host.

use anyhow::Result;
use skep_api::{ChangeModel, ModelAction};

use crate::commands::HostArgs;

/// Unload a model of a running host, and free its memory
///
/// Running requests and turns may finish first. The model stays unloaded until `skep model load`; one with
/// `load = "demand"` is loaded again by the next request. Needs an admin key if the host requires keys.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model unload big
  skep model unload big --drain 5               cuts off what still runs after 5 seconds")]
pub struct Args {
    /// Name or alias of the model
    model: String,
    /// Seconds that running requests and turns may continue
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain: u64,
    /// Return once no new request gets the model
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Unloads the model, and prints its state.
pub async fn run(args: Args) -> Result<()> {
    let change = ChangeModel {
        model: args.model,
        action: ModelAction::Unload,
        wait: !args.no_wait,
        drain_s: Some(args.drain),
        ..ChangeModel::default()
    };
    let model = args.host.client()?.change_model(&change).await?;
    super::status::print(&[model], args.json)
}
