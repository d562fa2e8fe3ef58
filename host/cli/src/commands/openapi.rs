//! `skep openapi`: prints the OpenAPI document of the HTTP API.

use anyhow::Result;

/// Print the OpenAPI 3.1 document of the HTTP API
///
/// A running host serves the same document at /openapi.json. No host is needed here, so a build can generate a
/// client from it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep openapi > openapi.json
  skep openapi | jq -r '.paths | keys[]'")]
pub struct Args {}

/// Prints the document.
pub fn run(_: &Args) -> Result<()> {
    super::out::json(&skep_gateway::openapi_document())
}
