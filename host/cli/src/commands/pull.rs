//! `skep pull`: fetches an agent from a registry.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::json;

use super::{out, registry_args::RegistryArgs};
use crate::agent_source::AgentSource;
use crate::progress::Terminal;
use crate::registry::{ArtifactName, Registry};

/// Fetch an agent from an OCI registry into a folder
///
/// The folder gets NAME.wasm and agent.toml. `skep deploy oci://…` deploys without a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep pull oci://registry.example.com/agents/my-agent:1.2
  skep pull oci://localhost:5000/my-agent --output here")]
pub struct Args {
    /// Artifact to fetch
    #[arg(value_name = "oci://REGISTRY/REPOSITORY:TAG")]
    name: ArtifactName,
    /// Folder to write to [default: the agent's name]
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Fetches the agent, and writes its component and manifest.
pub async fn run(args: Args) -> Result<()> {
    let registry = Registry::new(args.name.clone(), args.registry.login()?, args.registry.plain_http)?;
    let pulled = registry.pull(&Terminal).await?;
    let source = AgentSource::from_parts(pulled.manifest_toml, &pulled.component, None)
        .with_context(|| args.name.to_string())?;
    let name = source.manifest.name.as_str();
    let dir = args.output.unwrap_or_else(|| PathBuf::from(name));
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let component = dir.join(format!("{name}.wasm"));
    write_both(&dir.join("agent.toml"), &source.manifest_toml, &component, &source.component)?;
    if args.json {
        return out::json(&json!({"agent": name, "digest": pulled.digest, "component": component}));
    }
    out::line(&format!("{} ({})", component.display(), pulled.digest))?;
    out::line(&format!("deploy it with: skep deploy {}", component.display()))
}

/// Writes both files, or none of them, so that a pull that fails can be repeated.
fn write_both(manifest: &Path, manifest_toml: &str, component: &Path, bytes: &[u8]) -> Result<()> {
    write_new(manifest, manifest_toml.as_bytes())?;
    write_new(component, bytes).inspect_err(|_| _ = std::fs::remove_file(manifest))
}

/// Writes a new file, completely or not at all. A file that exists is never replaced.
fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = std::fs::OpenOptions::new().write(true).create_new(true).open(path);
    match file {
        Ok(mut file) => std::io::Write::write_all(&mut file, bytes)
            .inspect_err(|_| _ = std::fs::remove_file(path))
            .with_context(|| format!("cannot write {}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!("{} already exists\n  hint: choose another folder with --output", path.display())
        }
        Err(error) => Err(error).with_context(|| format!("cannot write {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_into_a_folder_that_has_one_of_the_files_writes_neither() {
        let names = |dir: &Path| -> Vec<_> {
            std::fs::read_dir(dir)
                .expect("a folder")
                .map(|entry| entry.expect("an entry").file_name())
                .collect()
        };
        for existing in ["agent.toml", "a.wasm"] {
            let dir = tempfile::tempdir().expect("temporary folder");
            std::fs::write(dir.path().join(existing), "mine").expect("file");
            let (manifest, component) = (dir.path().join("agent.toml"), dir.path().join("a.wasm"));
            let error = write_both(&manifest, "new", &component, b"new").expect_err(existing);
            assert!(error.to_string().contains(&format!("{existing} already exists")), "{error}");
            assert_eq!(names(dir.path()), [existing]);
            assert_eq!(std::fs::read(dir.path().join(existing)).expect("file"), b"mine");
        }
    }
}
