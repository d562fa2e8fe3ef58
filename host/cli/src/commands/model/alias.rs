//! `skep model alias`: points an alias at a model of a running host.

use anyhow::Result;
use skep_api::{ChangeModel, ModelAction};

use crate::commands::HostArgs;

/// Point an alias at a model of a running host, until the host stops
///
/// Agents that name the alias use the new model from their next conversation on, without a deployment. Set
/// `aliases` under [[model]] in skep.toml for the next start. Needs an admin key if the host requires keys.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep model alias fast small")]
pub struct Args {
    /// The alias
    alias: String,
    /// Name or alias of the model that it points to
    model: String,
    #[command(flatten)]
    host: HostArgs,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Points the alias at the model, and prints the model.
pub async fn run(args: Args) -> Result<()> {
    let change = ChangeModel {
        model: args.model,
        action: ModelAction::Alias,
        alias: Some(args.alias),
        ..ChangeModel::default()
    };
    let model = args.host.client()?.change_model(&change).await?;
    super::status::print(&[model], args.json)
}
