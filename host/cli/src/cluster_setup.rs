//! The place of a host in a cluster: a shared database, a shared key, and an address at which the others reach it.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, anyhow, bail};
use skep_gateway::ClusterKey;
use skep_outbound::Url;
use skep_runtime::{HostRole, placement::Placement};

use crate::database_flag::DatabaseAddress;

/// Environment variable with the key, for hosts without a file.
pub const KEY_VARIABLE: &str = "SKEP_CLUSTER_KEY";
/// Maximum size of a key file that is read.
const MAX_KEY_FILE_BYTES: u64 = 64 << 10;

/// The settings as the flags and `skep.toml` give them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSetup {
    /// Whether the host joins the other hosts of its database.
    pub enabled: bool,
    /// The address at which the other hosts reach this one; by default the one that it listens on.
    pub url: Option<String>,
    pub key_file: Option<PathBuf>,
    pub role: HostRole,
    /// The model of requests without one at a host that has no model of its own.
    pub default_model: Option<String>,
    /// The host at which a session begins that nobody owns.
    pub placement: Placement,
    /// Number of tokens of a prompt from which on a decode host has a prefill host compute them, if that pays.
    pub prefill_tokens: Option<u32>,
}

/// The place of a host in its cluster.
#[derive(Debug, Clone)]
pub struct ClusterPlace {
    /// The address of the database.
    pub database: String,
    /// The address of this host.
    pub url: String,
    pub key: ClusterKey,
    pub role: HostRole,
}

impl ClusterSetup {
    /// Checks that the role fits: all roles but `all` need other hosts, and gateways and balancers have no models. `names_models`
    /// says whether the flags or the file name any.
    pub fn check_role(&self, names_models: bool) -> Result<()> {
        let role = name_of(self.role);
        if self.role != HostRole::All && !self.enabled {
            bail!(
                "a host with the role {role:?} works with other hosts, but this one is not in a cluster\n  hint: add --cluster (or \
                 enabled = true under [cluster] in skep.toml), or remove the role"
            );
        }
        if !self.role.computes() && names_models {
            bail!(
                "a host with the role {role:?} computes no model, but models are named\n  hint: remove --model (or model and \
                 [[model]] in skep.toml), or start the host with --role all"
            );
        }
        Ok(())
    }

    /// Checks that a host whose role is about the pages of other hosts exchanges pages with them.
    pub fn check_pages(&self, has_peers: bool) -> Result<()> {
        if matches!(self.role, HostRole::Prefill | HostRole::Decode) && !has_peers {
            bail!(
                "a host with the role {:?} exchanges KV pages with other hosts, but peers under [kv] is false\n  hint: remove that \
                 setting, or start the host with --role all",
                name_of(self.role)
            );
        }
        Ok(())
    }

    /// Checks that a host that is to deploy agents runs agents. `names_agents` says whether it is to deploy any.
    pub fn check_agents(&self, names_agents: bool) -> Result<()> {
        if names_agents && !self.role.runs_agents() {
            bail!(
                "a host with the role {:?} runs no agents, and agents are named\n  hint: start it without them, and deploy them at \
                 another host with `skep deploy PATH --url http://HOST:PORT`",
                name_of(self.role)
            );
        }
        Ok(())
    }

    /// Returns the place of a host that listens on `listen`, or `None` if it is not to be in a cluster. `environment` is
    /// the value of [`KEY_VARIABLE`].
    pub fn place(
        &self,
        listen: SocketAddr,
        database: Option<&DatabaseAddress>,
        standby: bool,
        environment: Option<String>,
    ) -> Result<Option<ClusterPlace>> {
        if !self.enabled {
            return Ok(None);
        }
        let Some(DatabaseAddress::Postgres(database)) = database else {
            bail!(
                "the hosts of a cluster share a PostgreSQL database\n  hint: --database postgres://USER@HOST:5432/DATABASE, \
                 or start the host without --cluster"
            );
        };
        if standby {
            bail!(
                "a host of a cluster cannot stand by, because it takes part at once\n  hint: remove --standby, or standby in skep.toml"
            );
        }
        let url = match &self.url {
            Some(url) => checked(url)?,
            None if listen.ip().is_unspecified() => bail!(
                "the other hosts cannot reach this one at {listen}\n  hint: say where they can with --cluster-url \
                 http://10.0.0.2:{}, or url under [cluster] in skep.toml",
                listen.port()
            ),
            None => format!("http://{listen}"),
        };
        let key = self.key(environment)?;
        Ok(Some(ClusterPlace { database: database.clone(), url, key, role: self.role }))
    }

    /// Returns the key that the hosts share, in a cluster or not. `environment` is the value of [`KEY_VARIABLE`].
    pub(crate) fn key(&self, environment: Option<String>) -> Result<ClusterKey> {
        let Some(file) = &self.key_file else {
            let Some(secret) = environment.filter(|secret| !secret.is_empty()) else {
                bail!(
                    "hosts of a cluster, or with a common cache, recognize each other by a key, and there is none\n  hint: make one with `openssl \
                     rand -hex 32 > cluster.key`, copy it to all hosts, and name it with --cluster-key-file or key_file under \
                     [cluster] in skep.toml; or set {KEY_VARIABLE}"
                );
            };
            return ClusterKey::new(secret.as_bytes()).map_err(|why| anyhow!("{KEY_VARIABLE}: {why}"));
        };
        let shown = file.display();
        let read = || {
            let bytes = std::fs::metadata(file)?.len();
            if bytes > MAX_KEY_FILE_BYTES {
                return Err(std::io::Error::other(format!("it has {bytes} bytes")));
            }
            std::fs::read(file)
        };
        let secret = read().with_context(|| format!("cannot read the cluster's key in {shown}"))?;
        ClusterKey::new(&secret).map_err(|why| anyhow!("{shown}: {why}"))
    }
}

/// Returns the name of a role, as flags and files have it.
pub fn name_of(role: HostRole) -> &'static str {
    match role {
        HostRole::All => "all",
        HostRole::Gateway => "gateway",
        HostRole::Prefill => "prefill",
        HostRole::Decode => "decode",
        HostRole::Balancer => "balancer",
    }
}

/// Checks the address of a host, and returns it with nothing but its host and its port.
fn checked(url: &str) -> Result<String> {
    let parsed = Url::parse(url).ok().filter(|parsed| {
        let is_plain = parsed.username().is_empty() && parsed.password().is_none();
        let has_rest = parsed.path() != "/" || parsed.query().is_some() || parsed.fragment().is_some();
        parsed.scheme() == "http" && is_plain && !has_rest
    });
    match parsed.as_ref().and_then(|parsed| Some((parsed.host_str()?, parsed.port()))) {
        Some((host, Some(port))) => Ok(format!("http://{host}:{port}")),
        Some((host, None)) => Ok(format!("http://{host}")),
        None => bail!(
            "{url:?} is not the address of a host of a cluster\n  hint: write it as http://10.0.0.2:8080; the hosts talk to each \
             other over plain HTTP, in a network that only they and the balancer can reach"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn place(setup: &ClusterSetup, listen: &str, database: &str) -> Result<Option<ClusterPlace>> {
        let database: DatabaseAddress = database.parse()?;
        setup.place(listen.parse()?, Some(&database), false, Some(KEY.to_owned()))
    }

    fn enabled() -> ClusterSetup {
        ClusterSetup { enabled: true, ..ClusterSetup::default() }
    }

    #[test]
    fn a_host_is_reached_where_it_listens_unless_it_says_otherwise() {
        let database = "postgres://db/skep";
        assert!(place(&ClusterSetup::default(), "0.0.0.0:1", database).expect("no cluster").is_none());
        let found = place(&enabled(), "10.0.0.2:8080", database).expect("an address").expect("a place");
        assert_eq!((found.url.as_str(), found.database.as_str()), ("http://10.0.0.2:8080", database));
        let found = place(&enabled(), "[::1]:8080", database).expect("an address").expect("a place");
        assert_eq!(found.url, "http://[::1]:8080");
        for unspecified in ["0.0.0.0:8080", "[::]:8080"] {
            let error = place(&enabled(), unspecified, database).expect_err(unspecified).to_string();
            assert!(error.contains("--cluster-url http://10.0.0.2:8080"), "{error}");
        }
        let setup = ClusterSetup { url: Some("http://skep-1.internal:8080/".to_owned()), ..enabled() };
        let found = place(&setup, "0.0.0.0:8080", database).expect("an address").expect("a place");
        assert_eq!(found.url, "http://skep-1.internal:8080");
        for wrong in [
            "https://10.0.0.2:8080",
            "http://10.0.0.2:8080/path",
            "http://me@10.0.0.2:8080",
            "http://10.0.0.2:8080?a",
            "10.0.0.2:8080",
            "",
        ] {
            let setup = ClusterSetup { url: Some(wrong.to_owned()), ..enabled() };
            let error = place(&setup, "10.0.0.2:8080", database).expect_err(wrong).to_string();
            assert!(error.contains("hint: write it as http://10.0.0.2:8080"), "{error}");
        }
    }

    #[test]
    fn a_cluster_needs_a_server_and_does_not_stand_by() {
        let error = place(&enabled(), "127.0.0.1:1", "sqlite:a.db").expect_err("a file").to_string();
        assert!(error.contains("PostgreSQL"), "{error}");
        let database: DatabaseAddress = "postgres://db/skep".parse().expect("an address");
        let listen = "127.0.0.1:1".parse().expect("an address");
        let error = enabled().place(listen, Some(&database), true, Some(KEY.to_owned()));
        assert!(error.expect_err("standby").to_string().contains("cannot stand by"));
        let error = enabled().place(listen, None, false, Some(KEY.to_owned())).expect_err("no database");
        assert!(error.to_string().contains("--database"), "{error}");
    }

    #[test]
    fn a_gateway_needs_a_cluster_and_has_no_models() {
        let gateway = ClusterSetup { role: HostRole::Gateway, ..enabled() };
        gateway.check_role(false).expect("other hosts have models");
        let found = place(&gateway, "127.0.0.1:1", "postgres://db/skep").expect("an address");
        assert_eq!(found.expect("a place").role, HostRole::Gateway);
        let error = gateway.check_role(true).expect_err("a model is named").to_string();
        assert!(error.contains("hint: remove --model (or model and [[model]] in skep.toml)"), "{error}");
        let alone = ClusterSetup { enabled: false, ..gateway };
        let error = alone.check_role(false).expect_err("there is nobody else").to_string();
        assert!(error.contains("hint: add --cluster"), "{error}");
        ClusterSetup::default().check_role(true).expect("a host as usual");
    }

    #[test]
    fn hosts_of_one_stage_need_a_cluster_and_those_with_pages_their_exchange() {
        for (role, has_models) in
            [(HostRole::Prefill, true), (HostRole::Decode, true), (HostRole::Balancer, false)]
        {
            let setup = ClusterSetup { role, ..enabled() };
            assert_eq!(setup.check_role(true).is_ok(), has_models, "{role:?}");
            setup.check_role(false).expect("in a cluster");
            let alone = ClusterSetup { enabled: false, ..setup.clone() };
            let error = alone.check_role(false).expect_err("alone").to_string();
            assert!(error.contains(name_of(role)) && error.contains("hint: add --cluster"), "{error}");
            setup.check_pages(true).expect("pages are exchanged");
            assert_eq!(setup.check_pages(false).is_err(), has_models, "{role:?}");
            setup.check_agents(false).expect("no agents");
            assert_eq!(setup.check_agents(true).is_ok(), role == HostRole::Decode, "{role:?}");
        }
    }

    #[test]
    fn the_key_comes_from_the_file_or_the_environment() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("cluster.key");
        let key = |setup: &ClusterSetup, environment: Option<&str>| setup.key(environment.map(str::to_owned));
        let in_file = ClusterSetup { key_file: Some(file.clone()), ..enabled() };
        let missing = format!("{:#}", key(&in_file, Some(KEY)).expect_err("no file"));
        assert!(missing.contains("cannot read the cluster's key in ") && missing.contains("cluster.key"));
        std::fs::write(&file, format!("{KEY}\n")).expect("file");
        let found = key(&in_file, Some("another one, which is not used")).expect("a key");
        assert_eq!(found, ClusterKey::new(KEY.as_bytes()).expect("a key"));
        assert_eq!(key(&enabled(), Some(KEY)).expect("a key"), found);
        for nothing in [None, Some("")] {
            let error = key(&enabled(), nothing).expect_err("no key").to_string();
            assert!(error.contains("SKEP_CLUSTER_KEY") && error.contains("openssl rand"), "{error}");
        }
        std::fs::write(&file, "short").expect("file");
        let error = key(&in_file, None).expect_err("too short").to_string();
        assert!(error.contains("cluster.key: a cluster's key must have 32"), "{error}");
        let error = key(&enabled(), Some("short")).expect_err("too short").to_string();
        assert!(error.starts_with("SKEP_CLUSTER_KEY: "), "{error}");
    }
}
