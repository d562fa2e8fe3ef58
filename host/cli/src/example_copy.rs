//! A copy of an example under another name: its crate, its agent, the commands of its README and the addresses in its
//! scripts are renamed, and it is a workspace of its own.
//!
//! The paths of the SDK become the placeholder [`SDK`], because only the caller knows where the SDK is.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::embedded::Example;

/// Placeholder for the path of the SDK in a `Cargo.toml`.
pub const SDK: &str = "{{sdk}}";

/// Text of an example's `Cargo.toml` before the path of the SDK, which differs by the depth of the crate.
const SDK_IN_EXAMPLES: [&str; 2] = ["../../../guest-sdk", "../../guest-sdk"];

/// Texts that the name of the agent follows in commands and their output. A name alone may be another word.
const BEFORE_NAME: [&str; 11] = [
    "cd examples/",
    "skep invoke ",
    "skep chat ",
    "skep turn ",
    "skep logs ",
    "skep list ",
    "session list ",
    "agent:",
    "cargo test -p ",
    "localhost:8080/",
    "127.0.0.1:8080/",
];

/// Returns the files of an example as the agent `name`, with their paths.
pub fn files(example: &'static Example, name: &str) -> Result<Vec<(PathBuf, String)>> {
    let files = example.files();
    let inner = inner_crates(&files);
    if inner.iter().any(|folder| folder.as_path() == Path::new(name)) {
        bail!(
            "the example {} has another agent that is called {name:?}\n  hint: choose another name, such as `my-{name}`",
            example.name
        );
    }
    let renamed = |(path, text): &(&Path, &str)| {
        let text = match path.to_str() {
            Some("Cargo.toml") => workspace(&named(text, example.name, name), &inner),
            Some("agent.toml") => named(text, example.name, name)
                .replace(&format!("\"/{}/", example.name), &format!("\"/{name}/")),
            Some("README.md") => readme(text, example.name, name),
            Some(script) if script.ends_with(".py") => {
                text.replace(&format!("/agents/{}/", example.name), &format!("/agents/{name}/"))
            }
            _ => (*text).to_owned(),
        };
        let text = match path.ends_with("Cargo.toml") {
            true => SDK_IN_EXAMPLES.iter().fold(text, |text, sdk| text.replace(sdk, SDK)),
            false => text,
        };
        (path.to_path_buf(), text)
    };
    Ok(files.iter().map(renamed).collect())
}

/// Returns the folders of the crates inside of an example.
pub fn inner_crates(files: &[(&'static Path, &'static str)]) -> Vec<PathBuf> {
    let folders =
        files.iter().filter(|(path, _)| path.ends_with("Cargo.toml")).filter_map(|(path, _)| path.parent());
    folders.filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_path_buf).collect()
}

fn named(text: &str, from: &str, to: &str) -> String {
    text.replacen(&format!("name = \"{from}\""), &format!("name = \"{to}\""), 1)
}

fn workspace(manifest: &str, inner: &[PathBuf]) -> String {
    let members: Vec<String> =
        inner.iter().map(|folder| format!("{:?}", folder.display().to_string())).collect();
    let members =
        if members.is_empty() { String::new() } else { format!("members = [{}]\n", members.join(", ")) };
    format!("{manifest}\n[workspace]\n{members}exclude = [\"vendor\"]\n")
}

/// Renames the agent in the commands of a README, and drops links to files that the copy does not have.
fn readme(text: &str, from: &str, to: &str) -> String {
    let mut text = text.replace(&format!("{from}__"), &format!("{to}__"));
    for before in BEFORE_NAME {
        text = text.replace(&format!("{before}{from}"), &format!("{before}{to}"));
    }
    let text = text.replace("cd examples/", "cd ").replacen(&format!("# {from}"), &format!("# {to}"), 1);
    without_outer_links(&text)
}

/// Replaces links to other folders, `[text](../path)`, by their text.
fn without_outer_links(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find("](../") {
        let (before, after) = rest.split_at(at);
        let Some((open, end)) = before.rfind('[').zip(after.find(')')) else { break };
        out.push_str(&before[..open]);
        out.push_str(&before[open + 1..]);
        rest = &after[end + 1..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::EXAMPLES;

    #[test]
    fn every_example_becomes_a_workspace_and_an_agent_of_the_given_name() {
        for example in &EXAMPLES {
            let files = files(example, "mine").unwrap_or_else(|error| panic!("{}: {error}", example.name));
            let text = |path: &str| {
                let file = files.iter().find(|(known, _)| known == Path::new(path));
                &*file.unwrap_or_else(|| panic!("{} has no {path}", example.name)).1
            };
            let cargo: toml::Table = toml::from_str(text("Cargo.toml")).expect(example.name);
            assert_eq!(cargo["package"]["name"].as_str(), Some("mine"), "{}", example.name);
            assert_eq!(cargo["dependencies"]["skep-sdk"]["path"].as_str(), Some(SDK), "{}", example.name);
            assert!(cargo.contains_key("workspace"), "{}", example.name);
            let manifest = skep_runtime::Manifest::from_toml(text("agent.toml")).expect(example.name);
            assert_eq!(manifest.name.as_str(), "mine");
            assert!(text("README.md").starts_with("# mine\n"), "{}", example.name);
            for left in
                [format!("examples/{}", example.name), format!("invoke {}", example.name), "](../".to_owned()]
            {
                assert!(!text("README.md").contains(&left), "{}: {left}", example.name);
            }
            for (path, text) in files.iter().filter(|(path, _)| path.extension() == Some("py".as_ref())) {
                let address = format!("/agents/{}", example.name);
                assert!(!text.contains(&address), "{}: {}", example.name, path.display());
            }
            for (path, text) in files.iter().filter(|(path, _)| path.ends_with("Cargo.toml")) {
                assert!(!text.contains("guest-sdk"), "{}: {}", example.name, path.display());
            }
        }
    }

    #[test]
    fn an_inner_crate_is_a_member_and_its_name_is_taken() {
        let example = Example::named("two-agents").expect("it is there");
        let files = files(example, "desk").expect("a good name");
        assert!(
            files.iter().any(
                |(path, text)| path.ends_with("Cargo.toml") && text.contains("members = [\"warehouse\"]")
            )
        );
        let error = super::files(example, "warehouse").expect_err("taken").to_string();
        assert!(error.contains("such as `my-warehouse`"), "{error}");
    }

    #[test]
    fn links_out_of_the_folder_become_text() {
        let text = "See [a](../a), [b](b.rs) and [c](../../c/d.md).";
        assert_eq!(without_outer_links(text), "See a, [b](b.rs) and c.");
    }
}
