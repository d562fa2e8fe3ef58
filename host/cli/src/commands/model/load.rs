//! `skep model load`: loads a model of a running host.

use anyhow::{Result, bail};
use skep_api::{ChangeModel, ModelAction, ModelDetails};

use crate::commands::HostArgs;
use crate::progress::{Progress as _, Terminal};

/// Interval between looks at a load.
const INTERVAL: std::time::Duration = std::time::Duration::from_millis(200);

/// Load a model of a running host, and wait until it can be used
///
/// The host must have been started with the model. `skep up` loads it automatically unless it has `load = "demand"`
/// in skep.toml. Needs an admin key if the host requires keys.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model load big
  skep model load big --no-wait")]
pub struct Args {
    /// Name or alias of the model
    model: String,
    /// Return once the load has begun
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Loads the model, and prints its state.
pub async fn run(args: Args) -> Result<()> {
    let client = args.host.client()?;
    let change =
        ChangeModel { model: args.model.clone(), action: ModelAction::Load, ..ChangeModel::default() };
    let mut model = client.change_model(&change).await?;
    if !args.no_wait {
        let step = Terminal.count(&format!("loading {}", model.id), 100);
        while let Some(ModelDetails { state, message, percent, .. }) = &model.skep
            && state == "loading"
        {
            step.note(message.as_deref().unwrap_or_default());
            step.advance_to(percent.unwrap_or(0).into());
            tokio::time::sleep(INTERVAL).await;
            model = client.model(&model.id).await?;
        }
        if let Some(ModelDetails { state, message, .. }) = &model.skep
            && state != "loaded"
        {
            bail!(
                "the model {} is {state}: {}",
                model.id,
                message.as_deref().unwrap_or("it was unloaded again")
            );
        }
        step.finish("");
    }
    super::status::print(&[model], args.json)
}
