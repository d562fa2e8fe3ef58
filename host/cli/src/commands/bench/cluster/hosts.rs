//! The hosts of the cluster: processes of `skep up` on one database, each at a port of its own, and their addresses as
//! clients know them.

use std::collections::HashMap;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::RngExt as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::super::proxy::Proxy;
use super::super::storm::{Life, Startup};
use super::ways::{Way, Ways};
use super::world::CALLEE;

/// Time in which a host has to start, however busy the machine is; meanwhile, its database may be away.
const START: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(200);
const KEY_BYTES: usize = 32;

/// The address of a host, and the names under which other hosts know it.
#[derive(Debug)]
pub struct Address {
    pub url: String,
    names: Vec<String>,
}

/// The addresses of the hosts that clients may ask, one for each place in the cluster.
#[derive(Debug, Default)]
pub struct Addresses(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    places: Vec<Option<Arc<Address>>>,
    /// URLs by name, those of hosts that are gone included. No number is given twice.
    urls: HashMap<String, String>,
}

impl Addresses {
    /// Returns one of the addresses, by a random number.
    pub fn pick(&self, draw: u32) -> Option<Arc<Address>> {
        let present = self.all();
        match present.len() {
            0 => None,
            count => present.get(draw as usize % count).cloned(),
        }
    }

    /// Returns the addresses of all hosts that run.
    pub fn all(&self) -> Vec<Arc<Address>> {
        self.known().places.iter().flatten().cloned().collect()
    }

    /// Returns the URL of the host with this name, even if it is gone.
    pub fn url_of(&self, name: &str) -> Option<String> {
        self.known().urls.get(name).cloned()
    }

    fn set(&self, place: usize, address: Option<Arc<Address>>) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Address { url, names }) = address.as_deref() {
            known.urls.extend(names.iter().map(|name| (name.clone(), url.clone())));
        }
        if known.places.len() <= place {
            known.places.resize(place + 1, None);
        }
        known.places[place] = address;
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running host.
struct Host {
    life: Life,
    address: Arc<Address>,
}

/// The settings that all hosts share.
#[derive(Clone, Debug)]
pub struct Site {
    pub folder: PathBuf,
    pub model: String,
    /// The address of the database.
    pub database: String,
    /// The address of the server outside.
    pub outside: String,
}

impl Site {
    /// Writes the configuration of the hosts at a place, and returns its file.
    fn configure(&self, place: usize, ways: &Ways) -> Result<PathBuf> {
        let (database, outside) = (toml::Value::from(ways.to_database(&self.database)?), &self.outside);
        let settings = format!(
            "database = {database}\n[secrets]\nkey_file = \"secrets.key\"\n\
             [grants]\nhosts = [\"{outside}\"]\ntools = [\"agent:{CALLEE}/*\"]\n\
             [outbound]\nallow_private = [\"127.0.0.0/8\"]\n"
        );
        // The address of the database may contain a password.
        let file = self.folder.join(format!("host-{place}.toml"));
        write_private(&file, settings.as_bytes())?;
        Ok(file)
    }

    /// Returns the file with the log of the host.
    pub fn log(&self) -> PathBuf {
        self.folder.join("host.log")
    }

    async fn start(&self, place: usize, ways: &Ways) -> Result<Life> {
        let port = TcpListener::bind("127.0.0.1:0").context("cannot listen on this machine")?;
        let listen = port.local_addr()?.to_string();
        // The host takes the port, which is free again.
        drop(port);
        let data = self.folder.join(format!("host-{place}"));
        let mut command = Startup::command(&self.model, &data, &self.configure(place, ways)?)?;
        command.args(["--listen", &listen, "--cluster", "--cluster-url", &ways.to_host(&listen)]);
        command.arg("--cluster-key-file").arg(self.folder.join("cluster.key"));
        Startup::run(command, &self.log())?.ready().await
    }
}

/// Writes the key of a cluster, `cluster.key`, and the key that secrets are sealed with, `secrets.key`.
pub fn write_keys(folder: &Path) -> Result<()> {
    let mut draws = rand::rng();
    let cluster: String = (0..KEY_BYTES).map(|_| format!("{:02x}", draws.random::<u8>())).collect();
    let secrets: [u8; KEY_BYTES] = draws.random();
    write_private(&folder.join("cluster.key"), cluster.as_bytes())?;
    write_private(&folder.join("secrets.key"), &secrets)
}

/// Writes a file that only its owner can read.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(bytes));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// The processes, which only the faults touch.
pub struct Hosts {
    site: Site,
    addresses: Arc<Addresses>,
    http: reqwest::Client,
    places: Vec<Option<Host>>,
    /// The proxies of each place.
    ways: Vec<Ways>,
    /// Number of starts after the first one of each place.
    pub restarts: usize,
}

impl Hosts {
    /// Creates a cluster without hosts.
    pub fn new(site: Site, addresses: Arc<Addresses>, http: reqwest::Client) -> Self {
        Self { site, addresses, http, places: Vec::new(), ways: Vec::new(), restarts: 0 }
    }

    /// Starts one more host.
    pub async fn add(&mut self) -> Result<()> {
        let place = self.places.len();
        let ways = Ways::new(&self.site.database).await?;
        self.ways.push(ways);
        self.places.push(None);
        self.open(place).await
    }

    /// Starts the host of a place again.
    pub async fn restart(&mut self, place: usize) -> Result<()> {
        self.restarts += 1;
        self.open(place).await
    }

    async fn open(&mut self, place: usize) -> Result<()> {
        let began = Instant::now();
        let host = loop {
            match self.started(place).await {
                Ok(host) => break host,
                Err(error) if began.elapsed() > START => {
                    let log = self.site.log();
                    return Err(error.context(format!("a host does not start; its log is {}", log.display())));
                }
                // The database may be away, or another program has taken the port.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        self.addresses.set(place, Some(Arc::clone(&host.address)));
        self.places[place] = Some(host);
        Ok(())
    }

    async fn started(&self, place: usize) -> Result<Host> {
        let life = self.site.start(place, &self.ways[place]).await?;
        let names = self.names(&life.url).await?;
        Ok(Host { address: Arc::new(Address { url: life.url.clone(), names }), life })
    }

    /// Asks a host how the others call it.
    async fn names(&self, url: &str) -> Result<Vec<String>> {
        let hosts = self.listed(url).await?;
        let Some(own) = hosts.iter().find(|host| host["this"] == true) else {
            bail!("the host at {url} is not in its own list of the cluster: {hosts:?}");
        };
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Ok(Vec::from(["number", "name", "url"].map(|key| text(&own[key]))))
    }

    /// Returns the hosts of the cluster as one of them lists them.
    async fn listed(&self, url: &str) -> Result<Vec<Value>> {
        let answer = self.http.get(format!("{url}/v1/cluster")).send().await?.error_for_status()?;
        let mut listed: Value = answer.json().await?;
        Ok(listed["hosts"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Returns the number of places.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// Returns the places whose host runs.
    pub fn running(&self) -> Vec<usize> {
        (0..self.places.len()).filter(|place| self.places[*place].is_some()).collect()
    }

    /// Returns the address of the host at a place, if one runs there.
    pub fn url(&self, place: usize) -> Option<String> {
        self.places[place].as_ref().map(|host| host.address.url.clone())
    }

    /// Returns whether another host no longer lists the host of a place, because it was replaced.
    pub async fn is_replaced(&self, place: usize) -> bool {
        let Some(host) = &self.places[place] else { return true };
        for other in self.addresses.all() {
            let Ok(listed) = self.listed(&other.url).await else { continue };
            return !listed.iter().any(|other| host.address.names.contains(&other["number"].to_string()));
        }
        false
    }

    /// Returns the proxy of the connections of a host at a place, if there is one.
    pub fn way(&self, place: usize, way: Way) -> Option<&Proxy> {
        self.ways[place].get(way)
    }

    /// Lets all traffic to and from the hosts of a place pass.
    pub fn thaw(&self, place: usize) {
        for way in [Way::Database, Way::Peers] {
            if let Some(proxy) = self.way(place, way) {
                proxy.thaw();
            }
        }
    }

    /// Makes clients ask other hosts, as a balancer does that watches `/readyz`.
    pub fn hide(&self, place: usize) {
        self.addresses.set(place, None);
    }

    /// Lets clients ask a host again.
    pub fn show(&self, place: usize) {
        let address = self.places[place].as_ref().map(|host| Arc::clone(&host.address));
        self.addresses.set(place, address);
    }

    /// Kills a host with SIGKILL.
    pub async fn kill(&mut self, place: usize) -> Result<()> {
        if let Some(host) = self.places[place].take() {
            host.life.kill().await?;
        }
        self.addresses.set(place, None);
        Ok(())
    }

    /// Stops the process of a host until it is resumed.
    pub fn stop(&self, place: usize) -> Result<()> {
        self.signal(place, Signal::STOP)
    }

    /// Resumes the process of a host that was stopped.
    pub fn resume(&self, place: usize) -> Result<()> {
        self.signal(place, Signal::CONT)
    }

    fn signal(&self, place: usize, signal: Signal) -> Result<()> {
        // A process that has not been waited for keeps its id.
        let id = self.places[place].as_ref().and_then(|host| host.life.id());
        let id = id.and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)).context("the host has exited")?;
        kill_process(id, signal).context("cannot send a signal to a host")
    }

    /// Removes the hosts that have exited by themselves, and returns their places with their exit codes.
    pub fn ended(&mut self) -> Vec<(usize, Option<i32>)> {
        let mut ended = Vec::new();
        for (place, host) in self.places.iter_mut().enumerate() {
            let status = host.as_mut().and_then(|host| host.life.exit_status());
            if let Some(status) = status {
                *host = None;
                self.addresses.set(place, None);
                ended.push((place, status.code()));
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_ask_only_hosts_that_are_shown() {
        let addresses = Addresses::default();
        assert!(addresses.pick(7).is_none());
        let address = |url: &str, name: &str| {
            Some(Arc::new(Address { url: url.to_owned(), names: vec![name.to_owned()] }))
        };
        addresses.set(2, address("http://c", "3"));
        addresses.set(0, address("http://a", "1"));
        let picked = |draw| addresses.pick(draw).map(|address| address.url.clone());
        assert_eq!(
            [0, 1, 2].map(picked),
            ["http://a", "http://c", "http://a"].map(|url| Some(url.to_owned()))
        );
        assert_eq!(addresses.url_of("3").as_deref(), Some("http://c"));
        addresses.set(2, None);
        assert_eq!([0, 1].map(picked), [(); 2].map(|()| Some("http://a".to_owned())));
        assert_eq!(addresses.url_of("3").as_deref(), Some("http://c"), "its last answer may be under way");
    }
}
