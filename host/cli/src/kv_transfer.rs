//! The lane that KV pages take between hosts: NIXL, in a helper process, or HTTP.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use skep_transfer::{AgentOptions, DEVICES_VARIABLE, Exposed, HINT, TransferAgent, exposed, find_library};

use crate::paths;

/// The command that runs the helper process.
pub const HELPER_COMMAND: &str = "kv-agent";

/// Values of `transfer` under `[kv]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferSetting {
    /// NIXL where its library is named, otherwise HTTP. A library that nobody named is not looked for: NIXL opens ports of its
    /// own, and asks nobody for a key.
    #[default]
    Auto,
    /// NIXL, and HTTP while it does not work. The host does not start without the library.
    Nixl,
    /// HTTP only.
    Http,
}

/// The settings of transfers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferSettings {
    pub lane: TransferSetting,
    /// Folder of the library; by default that of the environment.
    pub nixl_dir: Option<PathBuf>,
    /// Network devices on which NIXL listens, separated by commas; by default those of the environment.
    pub nixl_devices: Option<String>,
    /// Megabytes of memory that the host shares with the helper.
    pub nixl_mb: u32,
}

impl Default for TransferSettings {
    fn default() -> Self {
        TransferSettings { lane: TransferSetting::Auto, nixl_dir: None, nixl_devices: None, nixl_mb: 128 }
    }
}

impl TransferSettings {
    /// Returns the library to use, or `None` for HTTP. `environment` is the folder that the environment names.
    pub fn library(&self, environment: Option<PathBuf>) -> Result<Option<PathBuf>> {
        let folder = self.nixl_dir.clone().or(environment);
        match (self.lane, folder) {
            (TransferSetting::Http, _) | (TransferSetting::Auto, None) => Ok(None),
            (_, Some(folder)) => Ok(Some(find_library(&folder)?)),
            (TransferSetting::Nixl, None) => {
                bail!("`transfer = \"nixl\"` under [kv] needs the library of NIXL\n  hint: {HINT}")
            }
        }
    }

    /// Starts the helper of a host that others know under this address. `None` if pages travel over HTTP.
    pub(crate) fn start(&self, url: &str) -> Result<Option<TransferAgent>> {
        let Some(library) = self.library(paths::nixl_folder())? else { return Ok(None) };
        let listed = std::env::var(DEVICES_VARIABLE).ok();
        let devices = self.nixl_devices.clone().or(listed);
        match exposed(devices.as_deref()) {
            Ok(found) => found.iter().for_each(|Exposed { device, address }| {
                tracing::warn!(
                    device,
                    %address,
                    "NIXL may listen beyond private networks, and requires no key: name the devices of a private network \
                     with nixl_devices under [kv], or with {DEVICES_VARIABLE}"
                );
            }),
            Err(error) => tracing::warn!(%error, "it is not known on which addresses NIXL may listen"),
        }
        let name = format!("{url}/{:016x}", rand::random::<u64>());
        Ok(Some(TransferAgent::start(self.helper(name, library, devices)?)?))
    }

    /// Returns how a helper is started.
    pub(crate) fn helper(
        &self,
        name: String,
        library: PathBuf,
        devices: Option<String>,
    ) -> Result<AgentOptions> {
        let program = std::env::current_exe().context("cannot find the program of the helper")?;
        Ok(AgentOptions {
            name,
            library,
            program,
            arguments: vec![HELPER_COMMAND.to_owned()],
            environment: devices.map(|devices| (DEVICES_VARIABLE.to_owned(), devices)).into_iter().collect(),
            ring_bytes: u64::from(self.nixl_mb) << 20,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_take_nixl_only_where_its_library_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let named = Some(folder.path().to_owned());
        let settings = |lane| TransferSettings { lane, ..TransferSettings::default() };
        let [auto, nixl, http] =
            [TransferSetting::Auto, TransferSetting::Nixl, TransferSetting::Http].map(settings);
        assert_eq!(auto.library(None).expect("HTTP"), None);
        let error = nixl.library(None).expect_err("nothing is named").to_string();
        assert!(error.contains("hint: `pip download"), "{error}");
        for settings in [&auto, &nixl] {
            let error = settings.library(named.clone()).expect_err("an empty folder").to_string();
            assert!(error.contains(&*folder.path().to_string_lossy()), "{error}");
        }
        assert_eq!(http.library(named.clone()).expect("HTTP"), None);
        let library = folder.path().join("libnixl_capi.so");
        std::fs::write(&library, "").expect("a file");
        assert_eq!(auto.library(named).expect("a library"), Some(library.clone()));
        let configured = TransferSettings { nixl_dir: Some(folder.path().to_owned()), ..nixl };
        assert_eq!(configured.library(None).expect("a library"), Some(library));
    }
}
