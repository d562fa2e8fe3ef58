//! `skep new`: creates the crate of an agent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};
use skep_runtime::{AgentName, Manifest};

use super::out;
use crate::catalog::DEFAULT_MODEL;
use crate::embedded::{self, EXAMPLES, Example};
use crate::example_copy::{self, SDK};

/// Each template with the file that it becomes.
const FILES: [(&str, &str); 4] = [
    ("Cargo.toml", include_str!("../../templates/agent/Cargo.toml.in")),
    ("agent.toml", include_str!("../../templates/agent/agent.toml.in")),
    ("src/lib.rs", include_str!("../../templates/agent/lib.rs.in")),
    ("README.md", include_str!("../../templates/agent/README.md.in")),
];
const GITIGNORE: &str = include_str!("../../templates/agent/gitignore.in");

/// Folder for the crate's own copy of the SDK.
const VENDOR: &str = "vendor";

/// Create a crate for a new agent
///
/// The crate compiles as it is: one agent with one tool, a test with a scripted model, and an agent.toml; or a copy
/// of one of the examples. It contains the SDK in `vendor/`, so that it compiles wherever it is copied to.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep new my-agent
  skep new my-agent --path agents/mine
  skep new my-cafe --example events             a copy of an example
  skep new my-agent --sdk ../skep/guest-sdk     with an SDK that already exists")]
pub struct Args {
    /// Name of the agent and of its crate: lower-case letters, digits and hyphens
    name: String,
    /// Example to copy, instead of the agent with dice
    #[arg(long, short, value_name = "EXAMPLE", value_parser = example_names())]
    example: Option<String>,
    /// Folder to create [default: the name]
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// Folder of `skep-sdk` to depend on, relative to the current folder [default: a copy of it in the crate;
    /// in Skep's checkout, the one there]
    #[arg(long, value_name = "DIR")]
    sdk: Option<PathBuf>,
}

/// Writes the files of the crate.
pub fn run(args: &Args) -> Result<()> {
    check_name(&args.name)?;
    let dir = args.path.clone().unwrap_or_else(|| PathBuf::from(&args.name));
    if dir.exists() && std::fs::read_dir(&dir).map_or(true, |mut entries| entries.next().is_some()) {
        bail!("{} already exists\n  hint: choose another name, or another folder with --path", dir.display());
    }
    let example = args.example.as_deref().and_then(Example::named);
    let mut files = match example {
        Some(example) => example_copy::files(example, &args.name)?,
        None => from_templates(&args.name),
    };
    files.push((PathBuf::from(".gitignore"), GITIGNORE.to_owned()));
    let sdk = sdk(args.sdk.as_deref(), &dir)?;
    for (path, text) in files {
        let target = dir.join(&path);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let text = text.replace(SDK, &embedded::toml_path(&sdk_seen_from(&path, &sdk)));
        std::fs::write(&target, text).with_context(|| format!("cannot write {}", target.display()))?;
    }
    match example {
        Some(example) => {
            out::line(&format!("created {} from the example {}; next:", dir.display(), example.name))?
        }
        None => out::line(&format!("created {}; next:", dir.display()))?,
    }
    for command in next_commands(&dir, example) {
        out::line(&format!("  {command}"))?;
    }
    Ok(())
}

/// Returns the commands that test and start a new agent.
fn next_commands(dir: &Path, example: Option<&'static Example>) -> Vec<String> {
    let files = example.map(Example::files).unwrap_or_default();
    let inner = example_copy::inner_crates(&files);
    let mut test = format!("cargo test --manifest-path {}", dir.join("Cargo.toml").display());
    if !inner.is_empty() {
        test.push_str(" --workspace");
    }
    let mut up = String::from("skep up");
    if files.iter().any(|(path, _)| *path == Path::new("skep.toml")) {
        up.push_str(&format!(" --config {}", dir.join("skep.toml").display()));
    }
    for model in models(&files) {
        up.push_str(&format!(" --model {model}"));
    }
    for agent in std::iter::once(dir.to_path_buf()).chain(inner.iter().map(|inner| dir.join(inner))) {
        up.push_str(&format!(" {}", agent.display()));
    }
    vec![test, up]
}

/// Returns the models that a host needs for the agents of an example, besides the default.
fn models(files: &[(&Path, &str)]) -> BTreeSet<String> {
    let manifests = files.iter().filter(|(path, _)| path.ends_with("agent.toml"));
    let named = manifests.filter_map(|(_, text)| Manifest::from_toml(text).ok()?.model);
    named.filter(|model| model != DEFAULT_MODEL).collect()
}

/// Returns the files of the agent with dice.
fn from_templates(name: &str) -> Vec<(PathBuf, String)> {
    let mut function = name.replace('-', "_");
    if FILES.iter().any(|(_, template)| template.contains(&format!("fn {function}("))) {
        // The template has another function of this name.
        function.push_str("_agent");
    }
    let filled = |template: &str| template.replace("{{name}}", name).replace("{{ident}}", &function);
    FILES.map(|(path, template)| (PathBuf::from(path), filled(template))).into()
}

/// Returns the examples as the values of `--example`, for the help, the shell's completion and the error of a
/// misspelt name.
fn example_names() -> PossibleValuesParser {
    PossibleValuesParser::new(
        EXAMPLES.iter().map(|example| PossibleValue::new(example.name).help(example.summary)),
    )
}

/// Returns the path of the SDK as a file of the crate has to give it.
fn sdk_seen_from(file: &Path, sdk: &Path) -> PathBuf {
    if sdk.is_absolute() {
        return sdk.to_path_buf();
    }
    let depth = file.parent().map_or(0, |parent| parent.components().count());
    std::iter::repeat_n("..", depth).collect::<PathBuf>().join(sdk)
}

/// Returns the path of the SDK, as the manifest of the crate in `dir` gives it.
fn sdk(chosen: Option<&Path>, dir: &Path) -> Result<PathBuf> {
    let Some(chosen) = chosen else {
        return match embedded::sdk_beside(dir) {
            Some(sdk) => Ok(sdk),
            None => embedded::vendor_sdk(&dir.join(VENDOR)).map(|_| PathBuf::from(VENDOR).join("guest-sdk")),
        };
    };
    let manifest = std::fs::read_to_string(chosen.join("Cargo.toml")).unwrap_or_default();
    if !manifest.contains("name = \"skep-sdk\"") {
        bail!(
            "--sdk {}: this is not the folder of `skep-sdk`\n  hint: omit --sdk to get a copy",
            chosen.display()
        );
    }
    chosen.canonicalize().with_context(|| format!("--sdk {}", chosen.display()))
}

/// Checks that a name is valid for an agent and for a crate.
fn check_name(name: &str) -> Result<()> {
    let hint = "use lower-case letters, digits and hyphens, a letter first, such as `my-agent`";
    AgentName::new(name).map_err(|error| anyhow::anyhow!("{error}\n  hint: {hint}"))?;
    // Rust's keywords, and crates that an agent's crate sees under the same name.
    const TAKEN: &str = " as async await break const continue crate dyn else enum extern false fn for gen if impl in let loop \
        match mod move mut pub ref return self static struct super trait true try type unsafe use where while yield \
        test core std alloc skep-sdk serde serde-json schemars ";
    if TAKEN.contains(&format!(" {name} ")) {
        bail!(
            "{name:?} cannot be the name of a crate: it is a Rust keyword, or the name of a crate that an agent \
             uses\n  hint: choose another name, such as `{name}-agent`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_crate_can_have_are_refused() {
        check_name("my-agent-2").expect("a good name");
        for bad in ["", "2nd", "-a", "My-Agent", "my_agent", "a/b", "a b", "../x"] {
            let error = check_name(bad).expect_err(bad).to_string();
            assert!(error.contains("lower-case letters"), "{error}");
        }
        for taken in ["test", "fn", "skep-sdk"] {
            let error = check_name(taken).expect_err(taken).to_string();
            assert!(error.contains(&format!("such as `{taken}-agent`")), "{error}");
            check_name(&format!("{taken}-agent")).expect("the name of the hint");
        }
    }

    #[test]
    fn an_agent_can_have_the_name_of_a_function_of_the_template() {
        let of_template = |name: &str| {
            let mut files = from_templates(name).into_iter();
            files.find(|(path, _)| path.ends_with("lib.rs")).expect("the template has code").1
        };
        let functions = |code: &str| -> Vec<String> {
            let named = code.split("fn ").skip(1).filter_map(|rest| Some(rest.split_once('(')?.0.to_owned()));
            named.collect()
        };
        let others = functions(&of_template("my-agent"));
        assert!(others.len() > 4, "{others:?}");
        for name in others {
            let mut all = functions(&of_template(&name.replace('_', "-")));
            let count = all.len();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count, "{name}");
        }
    }

    #[test]
    fn manifest_template_is_a_valid_agent_toml() {
        let text = FILES[1].1.replace("{{name}}", "my-agent");
        skep_runtime::Manifest::from_toml(&text).expect("the template is valid");
    }

    #[test]
    fn the_command_that_starts_an_example_serves_its_model() {
        let up = |example| next_commands(Path::new("mine"), Example::named(example)).pop();
        assert_eq!(up("concierge").as_deref(), Some("skep up --model qwen2.5-0.5b mine"));
        assert_eq!(up("two-agents").as_deref(), Some("skep up --config mine/skep.toml mine mine/warehouse"));
    }

    #[test]
    fn folder_with_something_in_it_is_left_alone() {
        let dir = tempfile::tempdir().expect("temporary folder");
        std::fs::write(dir.path().join("mine"), b"x").expect("file");
        let args =
            Args { name: "my-agent".into(), example: None, path: Some(dir.path().to_path_buf()), sdk: None };
        assert!(run(&args).expect_err("not empty").to_string().contains("already exists"));
    }

    fn made(dir: &Path, sdk: Option<&Path>) -> String {
        let args = Args {
            name: "a".into(),
            example: None,
            path: Some(dir.to_path_buf()),
            sdk: sdk.map(Path::to_path_buf),
        };
        run(&args).expect("made");
        let text = std::fs::read_to_string(dir.join("Cargo.toml")).expect("it is there");
        let manifest: toml::Table = toml::from_str(&text).expect("valid TOML");
        manifest["dependencies"]["skep-sdk"]["path"].as_str().expect("a path").to_owned()
    }

    #[test]
    fn a_crate_finds_its_sdk_wherever_it_is_copied_to() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let dir = parent.path().join("a");
        assert_eq!(made(&dir, None), "vendor/guest-sdk");
        let moved = parent.path().join("b");
        std::fs::rename(&dir, &moved).expect("it can be moved");
        for file in ["guest-sdk/Cargo.toml", "guest-sdk/macros/Cargo.toml", "wit/skep-agent/agent.wit"] {
            assert!(moved.join("vendor").join(file).is_file(), "{file}");
        }
    }

    #[test]
    fn a_crate_in_the_checkout_depends_on_the_sdk_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the checkout");
        let parent = tempfile::tempdir_in(root.join("host/cli")).expect("temporary folder");
        let dir = parent.path().join("a");
        assert_eq!(made(&dir, None), "../../../../guest-sdk");
        assert!(dir.join("../../../../guest-sdk/Cargo.toml").is_file());
    }

    #[test]
    fn a_given_sdk_is_used_and_must_be_the_sdk() {
        let parent = tempfile::tempdir().expect("temporary folder");
        let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-sdk");
        let real = sdk.canonicalize().expect("it is there");
        assert_eq!(made(&parent.path().join("a"), Some(&sdk)), real.to_str().expect("UTF-8"));
        let args = Args {
            name: "b".into(),
            example: None,
            path: Some(parent.path().join("b")),
            sdk: Some(parent.path().into()),
        };
        let error = run(&args).expect_err("no SDK").to_string();
        assert!(error.contains("not the folder of `skep-sdk`"), "{error}");
        assert!(!parent.path().join("b").exists());
    }
}
