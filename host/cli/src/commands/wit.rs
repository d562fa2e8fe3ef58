//! `skep wit`: prints or writes the WIT package of agents.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::out;
use crate::embedded;

/// Print the WIT of the interface between agents and the host, or write it to a folder
///
/// Agents can be written in every language that builds WebAssembly components. Generate the bindings from this
/// package, `skep:agent`, and choose one of the worlds `agent`, `full-agent` and `agent-sync`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep wit | less                      the whole package as one document
  skep wit --out wit                   the files of the package, for a generator of bindings
  skep wit --out wit && wasm-tools component wit wit")]
pub struct Args {
    /// Folder to write the files of the package to; other files in it stay
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Prints the WIT files, or writes them to a folder.
pub fn run(args: &Args) -> Result<()> {
    let files = embedded::wit();
    let Some(dir) = &args.out else {
        let texts: Vec<&str> = files.iter().map(|(_, text)| text.trim_end()).collect();
        return out::line(&texts.join("\n\n"));
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    // A file of an older package, or of another one, would become a part of this one.
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    for entry in entries {
        let path = entry?.path();
        let is_ours = files.iter().any(|(name, _)| path.file_name().is_some_and(|found| found == *name));
        if path.extension().is_some_and(|extension| extension == "wit") && !is_ours {
            bail!(
                "{} is not part of this package\n  hint: remove it, or choose an empty folder",
                path.display()
            );
        }
    }
    for (name, text) in &files {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    out::line(&format!("wrote {} files of {} to {}", files.len(), package(&files), dir.display()))
}

/// Returns the name and the version of the package.
fn package<'a>(files: &[(&str, &'a str)]) -> &'a str {
    let lines = files.iter().flat_map(|(_, text)| text.lines());
    lines
        .filter_map(|line| line.strip_prefix("package "))
        .next()
        .map_or("the package", |name| name.trim_end_matches(';'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_written_folder_is_a_wit_package() {
        let dir = tempfile::tempdir().expect("a folder");
        let out = dir.path().join("wit");
        run(&Args { out: Some(out.clone()) }).expect("written");
        run(&Args { out: Some(out.clone()) }).expect("written again");
        std::fs::write(out.join("other.wit"), "package a:b;").expect("written");
        let error = run(&Args { out: Some(out) }).expect_err("another package").to_string();
        assert!(error.contains("other.wit is not part of this package"), "{error}");
    }

    #[test]
    fn the_files_begin_with_the_one_that_names_the_package() {
        let files = embedded::wit();
        assert!(package(&files).starts_with("skep:agent@"), "{}", package(&files));
        assert!(files[0].1.contains("\npackage skep:agent@"), "{} is first", files[0].0);
        let text: String = files.iter().map(|(_, text)| format!("{}\n\n", text.trim_end())).collect();
        let mut resolve = wit_parser::Resolve::default();
        let package = resolve.push_str("skep.wit", &text).expect("one document");
        assert!(resolve.packages[package].worlds.contains_key("agent-sync"));
    }
}
