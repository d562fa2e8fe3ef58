//! Agents as a person names them for a deployment: a folder with their source, or a finished `.wasm` file.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail};
use skep_runtime::{Manifest, RuntimeError};

use crate::guest_build::{self, BuildRequest, GuestTarget};
use crate::progress::Progress;

/// Maximum number of characters of each output of a failed build command that are shown.
const SHOWN_CHARS: usize = 8_000;

/// An agent that is ready to be deployed.
pub struct AgentSource {
    pub manifest: Manifest,
    /// The text that is sent to the host.
    pub manifest_toml: String,
    pub component: Vec<u8>,
}

impl AgentSource {
    /// Reads the agent at `path`, and builds it if needed. `manifest` replaces the manifest that is stored
    /// with it.
    pub fn load(path: &Path, manifest: Option<&Path>, progress: &dyn Progress) -> Result<Self> {
        if path.is_dir() {
            let manifest = manifest.map_or_else(|| path.join("agent.toml"), Path::to_path_buf);
            return Self::from_folder(path, &manifest, progress);
        }
        if !path.exists() {
            bail!("{} does not exist\n  hint: pass the folder of an agent, or a .wasm file", path.display());
        }
        Self::from_file(path, manifest)
    }

    fn from_folder(dir: &Path, manifest_path: &Path, progress: &dyn Progress) -> Result<Self> {
        let (manifest, manifest_toml) = read_manifest(manifest_path)?;
        let component = match (&manifest.build, &manifest.component) {
            (Some(build), Some(component)) => {
                run_build_command(dir, &build.command, progress)?;
                read_component(&dir.join(component))?
            }
            (Some(_), None) => bail!(
                "{} has a [build] command but no `component`\n  hint: add `component = \"PATH\"`, the path where the command \
                 writes the .wasm file; or remove [build], and skep builds the crate",
                manifest_path.display()
            ),
            (None, Some(component)) => read_component(&dir.join(component))?,
            (None, None) => {
                let request = BuildRequest { dir: dir.to_path_buf(), target: GuestTarget::Library };
                guest_build::build(&request, progress)?.component
            }
        };
        Ok(Self { manifest, manifest_toml, component })
    }

    fn from_file(path: &Path, manifest: Option<&Path>) -> Result<Self> {
        let component = read_component(path)?;
        let beside = path.with_file_name("agent.toml");
        let (manifest, manifest_toml) = match manifest {
            Some(given) => read_manifest(given)?,
            None if beside.is_file() => read_manifest(&beside)?,
            None => {
                let stem = path.file_stem().unwrap_or_default().to_string_lossy().replace('_', "-");
                let text = format!("name = {stem:?}\n");
                let manifest = Manifest::from_toml(&text).with_context(|| {
                    format!("{stem:?} is not a valid agent name\n  hint: pass --manifest agent.toml")
                })?;
                (manifest, text)
            }
        };
        Ok(Self { manifest, manifest_toml, component })
    }

    /// Makes an agent from what a registry stores. `manifest` replaces the manifest that was pushed.
    pub fn from_parts(manifest_toml: String, component: &[u8], manifest: Option<&Path>) -> Result<Self> {
        let component = guest_build::encode(component)?;
        let (manifest, manifest_toml) = match manifest {
            Some(given) => read_manifest(given)?,
            None => (Manifest::from_toml(&manifest_toml)?, manifest_toml),
        };
        Ok(Self { manifest, manifest_toml, component })
    }
}

/// Returns the path where the build command of the manifest in `dir` writes its component, if it has such a
/// command.
pub fn built_component(dir: &Path) -> Result<Option<PathBuf>> {
    let path = dir.join("agent.toml");
    if !path.is_file() {
        return Ok(None);
    }
    let (manifest, _) = read_manifest(&path)?;
    Ok(manifest.build.and(manifest.component).map(|component| dir.join(component)))
}

fn read_manifest(path: &Path) -> Result<(Manifest, String)> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("there is no {}\n  hint: `skep new NAME` creates an agent with one", path.display())
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let manifest = Manifest::from_toml(&text).map_err(|error| match error {
        // The file may have a name other than agent.toml.
        RuntimeError::Manifest { message } => anyhow::anyhow!("{}: {message}", path.display()),
        error => error.into(),
    })?;
    Ok((manifest, text))
}

fn read_component(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    guest_build::encode(&bytes).with_context(|| path.display().to_string())
}

fn run_build_command(dir: &Path, line: &str, progress: &dyn Progress) -> Result<()> {
    let step = progress.begin(&format!("running `{line}`"), None);
    let (shell, flag) = if cfg!(windows) { ("cmd", "/C") } else { ("sh", "-c") };
    let output = Command::new(shell)
        .arg(flag)
        .arg(line)
        .current_dir(dir)
        .stdin(std::process::Stdio::null())
        .output()
        .with_context(|| format!("cannot run `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` in {} failed ({}):\n{}", dir.display(), output.status, printed(&output));
    }
    step.finish("");
    Ok(())
}

/// Returns the ends of standard output and standard error, because some compilers write their errors to the former.
fn printed(output: &Output) -> String {
    let ends = [&output.stdout, &output.stderr].map(|printed| end(&String::from_utf8_lossy(printed)));
    ends.into_iter().filter(|end| !end.is_empty()).collect::<Vec<_>>().join("\n")
}

/// Returns the end of a text, which usually has the reason of a failure.
fn end(text: &str) -> String {
    let text = text.trim_end();
    match text.char_indices().rev().nth(SHOWN_CHARS - 1) {
        Some((start @ 1.., _)) => format!("…{}", &text[start..]),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;

    const COMPONENT: [u8; 8] = [0, b'a', b's', b'm', 0x0d, 0, 1, 0];

    #[test]
    fn lone_component_is_named_after_its_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("my_agent.wasm");
        std::fs::write(&path, COMPONENT).expect("file");
        let source = AgentSource::load(&path, None, &Silent).expect("a component");
        assert_eq!(source.manifest.name.as_str(), "my-agent");
        assert_eq!(source.component, COMPONENT);
    }

    #[test]
    fn build_command_of_the_manifest_makes_the_component() {
        let dir = tempfile::tempdir().expect("temporary folder");
        std::fs::write(dir.path().join("made"), COMPONENT).expect("file");
        let manifest = "name = \"x\"\ncomponent = \"out.wasm\"\n[build]\ncommand = \"cp made out.wasm\"\n";
        std::fs::write(dir.path().join("agent.toml"), manifest).expect("file");
        let source = AgentSource::load(dir.path(), None, &Silent).expect("built");
        assert_eq!(source.component, COMPONENT);
        let path = built_component(dir.path()).expect("readable").expect("it has a command");
        assert_eq!(std::fs::read(path).expect("it is there"), COMPONENT);
        let failing = manifest.replace("cp made", "cp unmade");
        std::fs::write(dir.path().join("agent.toml"), failing).expect("file");
        let error = AgentSource::load(dir.path(), None, &Silent).err().expect("cp fails").to_string();
        assert!(error.contains("cp unmade out.wasm"), "{error}");
    }

    #[test]
    fn a_failed_build_command_shows_the_end_of_both_outputs() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let failure = |line: &str| {
            let error = run_build_command(dir.path(), line, &Silent).expect_err("it fails").to_string();
            error.split_once("):\n").expect("what it printed follows").1.to_owned()
        };
        assert_eq!(failure("echo a.ts:1: no such type; exit 2"), "a.ts:1: no such type");
        assert_eq!(failure("echo note; echo wrong >&2; exit 2"), "note\nwrong");
        let long = failure("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; exit 2");
        assert!(long.starts_with('…') && long.ends_with("line 2999"), "{long}");
        assert_eq!(long.chars().count(), SHOWN_CHARS + 1);
    }

    #[test]
    fn a_mistake_in_a_manifest_is_reported_with_its_file_name_once() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("m.toml");
        std::fs::write(&path, "name = \"x\"\nfoo = 1\n").expect("file");
        let error = read_manifest(&path).expect_err("an unknown field");
        assert!(
            format!("{error:#}").starts_with(&format!("{}: line 2: unknown", path.display())),
            "{error:#}"
        );
    }

    #[test]
    fn folder_without_a_manifest_is_an_error_that_names_the_missing_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let error = AgentSource::load(dir.path(), None, &Silent).err().expect("empty").to_string();
        assert!(error.contains("agent.toml") && error.contains("skep new"), "{error}");
    }
}
