//! `[kv]` in `skep.toml`: KV pages on disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::Deserialize;

use super::kv_cluster::KvClusterConfig;
use crate::kv_disk::KvDiskOptions;
use crate::kv_transfer::{TransferSetting, TransferSettings};
use crate::number::number;

/// The section `[kv]`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvDiskConfig {
    /// Maximum size of all pages; 0 keeps none.
    #[serde(deserialize_with = "number::<0, 1_048_576, _, _>")]
    pub disk_gb: Option<u32>,
    /// Percentage of the disk that stays free.
    #[serde(deserialize_with = "number::<0, 90, _, _>")]
    pub disk_free_percent: Option<u8>,
    /// Maximum rate of writes.
    #[serde(deserialize_with = "number::<1, 100_000, _, _>")]
    pub write_mb_s: Option<u32>,
    /// Whether every prefix on disk is read, even if computing it is expected to be quicker.
    pub always_read: Option<bool>,
    /// Percentage of the pages that pinned sessions protect from eviction.
    #[serde(deserialize_with = "number::<0, 90, _, _>")]
    pub pin_percent: Option<u8>,
    /// Seconds before an alarm at which the pages of its session are read; 0 reads none ahead.
    #[serde(deserialize_with = "number::<0, 60, _, _>")]
    pub warm_ahead_s: Option<u32>,
    /// Whether pages are encrypted with the key of the secrets.
    pub encrypt: Option<bool>,
    /// Whether the hosts of a cluster give each other pages.
    pub peers: Option<bool>,
    /// The lane that these pages take.
    pub transfer: Option<TransferSetting>,
    /// Folder of NIXL's library, relative to the file of settings.
    pub nixl_dir: Option<PathBuf>,
    /// Network devices on which NIXL listens.
    pub nixl_devices: Option<String>,
    /// Megabytes of memory that are shared with the helper.
    #[serde(deserialize_with = "number::<1, 65_536, _, _>")]
    pub nixl_mb: Option<u32>,
    /// The source of pages that other hosts have.
    pub cluster: Option<KvClusterConfig>,
}

impl KvDiskConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut KvDiskOptions) -> Result<()> {
        super::set(&mut options.gigabytes, &self.disk_gb);
        super::set(&mut options.free_percent, &self.disk_free_percent);
        super::set(&mut options.write_mb_s, &self.write_mb_s);
        super::set(&mut options.always_read, &self.always_read);
        super::set(&mut options.pin_percent, &self.pin_percent);
        super::set(&mut options.is_encrypted, &self.encrypt);
        super::set(&mut options.has_peers, &self.peers);
        super::set(&mut options.transfer.lane, &self.transfer);
        super::set(&mut options.transfer.nixl_mb, &self.nixl_mb);
        let TransferSettings { nixl_dir, nixl_devices, .. } = &mut options.transfer;
        *nixl_dir = self.nixl_dir.clone().or(nixl_dir.take());
        *nixl_devices = self.nixl_devices.clone().or(nixl_devices.take());
        let warm_ahead = self.warm_ahead_s.map(|seconds| Duration::from_secs(seconds.into()));
        super::set(&mut options.warm_ahead, &warm_ahead);
        match &self.cluster {
            Some(cluster) => cluster.apply(options),
            None => Ok(()),
        }
    }

    /// Makes paths in the section relative to the folder of the file.
    pub(super) fn relative_to(&mut self, dir: &Path) {
        if let Some(folder) = &mut self.nixl_dir {
            *folder = dir.join(&*folder);
        }
        if let Some(library) = self.cluster.as_mut().and_then(|cluster| cluster.library.as_mut()) {
            *library = dir.join(&*library);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server_options::ServerOptions;

    #[test]
    fn pages_are_kept_within_the_bounds_of_the_file() {
        let applied = |text: &str| -> anyhow::Result<KvDiskOptions> {
            let mut options = ServerOptions::default();
            Config::parse(text)?.apply(&mut options)?;
            Ok(options.kv_disk)
        };
        assert_eq!(applied("").unwrap(), KvDiskOptions::default());
        let text = "[kv]\ndisk_gb = 7\ndisk_free_percent = 20\nwrite_mb_s = 50\nalways_read = true\npin_percent = 30\n\
                    warm_ahead_s = 0\nencrypt = true\npeers = false\ntransfer = \"nixl\"\nnixl_dir = \"nixl\"\n\
                    nixl_devices = \"eth1\"\nnixl_mb = 64\n\
                    [tenants.default]\nkv_disk_percent = 60\n[tenants.acme]\nkv_disk_percent = 20\n[tenants.big]\n";
        let expected = KvDiskOptions {
            gigabytes: 7,
            free_percent: 20,
            write_mb_s: 50,
            always_read: true,
            pin_percent: 30,
            warm_ahead: Duration::ZERO,
            is_encrypted: true,
            has_peers: false,
            transfer: TransferSettings {
                lane: TransferSetting::Nixl,
                nixl_dir: Some("nixl".into()),
                nixl_devices: Some("eth1".to_owned()),
                nixl_mb: 64,
            },
            cluster_cache: None,
            tenant_percent: [("acme".to_owned(), 20)].into(),
            other_tenants_percent: Some(60),
        };
        assert_eq!(applied(text).unwrap(), expected);
        for (text, expected) in [
            ("[kv]\ndisk_free_percent = 91\n", "must be between 0 and 90"),
            ("[kv]\nwarm_ahead_s = 61\n", "must be between 0 and 60"),
            ("[kv]\nnixl_mb = 0\n", "must be between 1 and 65536"),
            ("[kv]\ntransfer = \"rdma\"\n", "unknown variant `rdma`"),
            ("[tenants.acme]\nkv_disk_percent = 0\n", "must be between 1 and 100"),
        ] {
            let error = format!("{:#}", applied(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
