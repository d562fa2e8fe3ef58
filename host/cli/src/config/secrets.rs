//! `[secrets]` in `skep.toml`: the keys that secrets are sealed with.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Deserialize;
use skep_runtime::SealingKey;

/// The section `[secrets]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SecretsConfig {
    /// File with the keys, relative to the file of settings.
    pub key_file: Option<PathBuf>,
    /// A program that prints the keys, with its arguments.
    pub key_command: Option<Vec<String>>,
}

impl SecretsConfig {
    /// Makes the path of the key file relative to `dir`.
    pub(super) fn relative_to(&mut self, dir: &Path) {
        if let Some(file) = &mut self.key_file {
            *file = dir.join(&*file);
        }
    }

    /// Returns where the keys are, if the file names one.
    pub fn sealing_key(&self) -> Result<Option<SealingKey>> {
        Ok(match (&self.key_file, &self.key_command) {
            (Some(_), Some(_)) => {
                bail!("[secrets] sets both key_file and key_command\n  hint: remove one of them")
            }
            (Some(file), None) => Some(SealingKey::File(file.clone())),
            (None, Some(words)) if words.iter().all(String::is_empty) => {
                bail!(
                    "[secrets] key_command is empty\n  hint: name a program and its arguments, each as one text"
                )
            }
            (None, Some(words)) => Some(SealingKey::Command(words.clone())),
            (None, None) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server_options::ServerOptions;

    #[test]
    fn the_keys_come_from_a_file_or_a_program() {
        let applied = |text: &str| -> Result<SealingKey> {
            let mut options = ServerOptions::default();
            Config::parse(text)?.apply(&mut options)?;
            Ok(options.runtime.sealing_key)
        };
        assert_eq!(applied("").unwrap(), SealingKey::InMemory);
        assert_eq!(applied("[secrets]\nkey_file = \"/k\"").unwrap(), SealingKey::File("/k".into()));
        let command = SealingKey::Command(vec!["print-keys".into(), "skep".into()]);
        assert_eq!(applied("[secrets]\nkey_command = [\"print-keys\", \"skep\"]").unwrap(), command);
        for (text, expected) in [
            ("[secrets]\nkey_file = \"/k\"\nkey_command = [\"p\"]", "remove one of them"),
            ("[secrets]\nkey_command = []", "key_command is empty"),
            ("[secrets]\nkey = 1", "unknown field `key`"),
        ] {
            let error = format!("{:#}", applied(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
