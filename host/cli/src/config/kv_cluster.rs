//! `[kv.cluster]` in `skep.toml`: where the hosts of a cluster get each other's KV pages from.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::Deserialize;

use crate::cluster_cache::CacheOptions;
use crate::kv_disk::KvDiskOptions;
use crate::number::number;

/// Maximum length of a name or an address.
const MAX_TEXT_BYTES: usize = 255;
/// Memory of a host for pages of all hosts, unless the file says something else.
const SEGMENT_MB: u32 = 512;
/// Memory for pages on their way, unless the file says something else.
const BUFFER_MB: u32 = 48;

/// The section as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvClusterConfig {
    pub kind: Option<KindSetting>,
    /// The folder of Mooncake's library, relative to the file of settings.
    pub library: Option<PathBuf>,
    /// The address of Mooncake's master.
    pub master: Option<String>,
    /// The address of Mooncake's metadata server.
    pub metadata: Option<String>,
    /// The name or the address under which other hosts reach this one.
    pub hostname: Option<String>,
    pub protocol: Option<ProtocolSetting>,
    /// The devices that move bytes.
    pub devices: Option<String>,
    #[serde(deserialize_with = "number::<0, 1_048_576, _, _>")]
    pub segment_mb: Option<u32>,
    #[serde(deserialize_with = "number::<16, 4_096, _, _>")]
    pub buffer_mb: Option<u32>,
}

/// Values of `kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KindSetting {
    /// The hosts give each other pages of their disks.
    Peers,
    /// The hosts keep pages in Mooncake Store.
    Mooncake,
}

/// Values of `protocol`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProtocolSetting {
    Tcp,
    Rdma,
}

impl KvClusterConfig {
    pub(super) fn apply(&self, options: &mut KvDiskOptions) -> Result<()> {
        let kind_only = KvClusterConfig { kind: self.kind, ..KvClusterConfig::default() };
        match self.kind {
            None => bail!(
                "[kv.cluster] has no kind\n  hint: kind = \"mooncake\" for a cache in Mooncake Store, kind = \"peers\" for the disks \
                 of the hosts"
            ),
            Some(KindSetting::Peers) if *self != kind_only => bail!(
                "[kv.cluster] of the kind \"peers\" has no other settings\n  hint: remove them, or write kind = \"mooncake\""
            ),
            Some(KindSetting::Peers) => options.has_peers = true,
            Some(KindSetting::Mooncake) => options.cluster_cache = Some(self.mooncake()?),
        }
        Ok(())
    }

    fn mooncake(&self) -> Result<CacheOptions> {
        let Some(master) = &self.master else {
            bail!(
                "[kv.cluster] has no master\n  hint: master = \"10.0.0.5:50051\", where mooncake_master listens"
            );
        };
        if !master
            .rsplit_once(':')
            .is_some_and(|(name, port)| !name.is_empty() && port.parse::<u16>().is_ok())
        {
            bail!("{master:?} is not the address of a master\n  hint: write it as \"10.0.0.5:50051\"");
        }
        let metadata = self.metadata.clone().unwrap_or_else(|| "P2PHANDSHAKE".to_owned());
        let devices = self.devices.clone().unwrap_or_default();
        let texts = [("master", master), ("metadata", &metadata)];
        let hostname = self.hostname.iter().map(|hostname| ("hostname", hostname));
        for (key, text) in texts.into_iter().chain(hostname) {
            if text.is_empty() {
                bail!("{key} under [kv.cluster] is empty\n  hint: remove it, or give it a value");
            }
            checked(key, text)?;
        }
        checked("devices", &devices)?;
        let protocol = match self.protocol.unwrap_or(ProtocolSetting::Tcp) {
            ProtocolSetting::Tcp => "tcp",
            ProtocolSetting::Rdma => "rdma",
        };
        Ok(CacheOptions {
            library: self.library.clone(),
            master: master.clone(),
            metadata,
            hostname: self.hostname.clone(),
            protocol: protocol.to_owned(),
            devices,
            segment_mb: self.segment_mb.unwrap_or(SEGMENT_MB),
            buffer_mb: self.buffer_mb.unwrap_or(BUFFER_MB),
        })
    }
}

fn checked(key: &str, text: &str) -> Result<()> {
    if text.len() > MAX_TEXT_BYTES || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!(
            "{key} under [kv.cluster] is not usable\n  hint: it has at most {MAX_TEXT_BYTES} characters of ASCII, without spaces"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::server_options::ServerOptions;

    fn applied(text: &str) -> Result<KvDiskOptions> {
        let mut options = ServerOptions::default();
        Config::parse(text)?.apply(&mut options)?;
        Ok(options.kv_disk)
    }

    #[test]
    fn the_cluster_cache_comes_from_the_file() {
        let text = "[kv.cluster]\nkind = \"mooncake\"\nmaster = \"10.0.0.5:50051\"\n";
        let expected = CacheOptions {
            library: None,
            master: "10.0.0.5:50051".to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
            hostname: None,
            protocol: "tcp".to_owned(),
            devices: String::new(),
            segment_mb: SEGMENT_MB,
            buffer_mb: BUFFER_MB,
        };
        assert_eq!(applied(text).expect("valid").cluster_cache, Some(expected.clone()));
        let all = "metadata = \"http://10.0.0.5:8080/metadata\"\nhostname = \"ib-1\"\nprotocol = \"rdma\"\ndevices = \"mlx5_0,mlx5_1\"\n\
                   segment_mb = 0\nbuffer_mb = 64\nlibrary = \"lib\"\n";
        let expected = CacheOptions {
            library: Some("lib".into()),
            metadata: "http://10.0.0.5:8080/metadata".to_owned(),
            hostname: Some("ib-1".to_owned()),
            protocol: "rdma".to_owned(),
            devices: "mlx5_0,mlx5_1".to_owned(),
            segment_mb: 0,
            buffer_mb: 64,
            ..expected
        };
        assert_eq!(applied(&format!("{text}{all}")).expect("valid").cluster_cache, Some(expected));
        let peers = applied("[kv]\npeers = false\n[kv.cluster]\nkind = \"peers\"\n").expect("valid");
        assert_eq!((peers.has_peers, peers.cluster_cache), (true, None));
    }

    #[test]
    fn the_library_is_found_from_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("skep.toml");
        let text = "[kv.cluster]\nkind = \"mooncake\"\nmaster = \"a:1\"\nlibrary = \"lib\"\n";
        std::fs::write(&file, text).expect("a file");
        let mut options = ServerOptions::default();
        Config::read(&file).expect("valid").apply(&mut options).expect("valid");
        let library = options.kv_disk.cluster_cache.expect("a cache").library;
        assert_eq!(library, Some(folder.path().join("lib")));
    }

    #[test]
    fn a_cluster_cache_that_cannot_work_is_an_error_with_a_hint() {
        for (text, expected) in [
            ("", "has no kind"),
            ("kind = \"redis\"\n", "peers"),
            ("kind = \"mooncake\"\n", "hint: master = \"10.0.0.5:50051\""),
            ("kind = \"mooncake\"\nmaster = \"10.0.0.5\"\n", "is not the address of a master"),
            ("kind = \"mooncake\"\nmaster = \"a b:1\"\n", "without spaces"),
            (
                "kind = \"mooncake\"\nmaster = \"a:1\"\nhostname = \"\"\n",
                "hostname under [kv.cluster] is empty",
            ),
            ("kind = \"mooncake\"\nmaster = \"a:1\"\nhostname = \"a\\u0000\"\n", "without spaces"),
            ("kind = \"mooncake\"\nmaster = \"a:1\"\nbuffer_mb = 15\n", "must be between 16 and 4096"),
            ("kind = \"mooncake\"\nmaster = \"a:1\"\nprotocol = \"cxl\"\n", "tcp"),
            ("kind = \"peers\"\nmaster = \"a:1\"\n", "has no other settings"),
        ] {
            let error = format!("{:#}", applied(&format!("[kv.cluster]\n{text}")).expect_err(text));
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
