//! Agents that make HTTP requests: grants, secrets through the command line, and traces of a secret on the
//! host's side.

use crate::harness::{Host, client};
use skep_cli::server_options::ServerOptions;
use std::{
    io::Write,
    process::{Command, Stdio},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

const VALUE: &str = "sk_live_4eC39HqLyjWD";

/// Starts a server that echoes the request, including its head.
async fn echo_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
                let head_line =
                    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", head.len());
                let _ = stream.write_all(&[head_line.as_bytes(), &head].concat()).await;
            });
        }
    });
    origin
}

/// Starts a host whose operator lets agents reach this machine.
fn host(data: Option<&std::path::Path>) -> Host {
    let mut options: ServerOptions = Host::options(data);
    options.runtime.granted_hosts = vec!["*".parse().unwrap()].try_into().unwrap();
    options.runtime.outbound.addresses.allow_private = vec!["127.0.0.0/8".parse().unwrap()];
    Host::start_with(options)
}

/// Runs `skep` with this standard input. Returns whether it succeeded, and its output.
async fn skep(host: &Host, arguments: &[&str], input: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).env("SKEP_URL", &host.url).env("NO_COLOR", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let input = input.to_owned();
    let run = move || {
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn a_secret_set_on_the_command_line_reaches_only_its_server() {
    let data = tempfile::tempdir().unwrap();
    let (origin, host) = (echo_server().await, host(Some(data.path())));
    let manifest =
        format!("[grants]\nhosts = [\"*\"]\nsecrets = [{{ name = \"PAY_KEY\", hosts = [{origin:?}] }}]");
    assert_eq!(host.deploy_guest("web", "payer", &manifest).await.0, 201);
    let ask =
        async |text: &str| host.message("payer", "s", text).await.1["text"].as_str().unwrap().to_owned();
    assert!(ask(&format!("GET {origin}/plain")).await.starts_with("200 GET /plain HTTP/1.1\r\n"));
    let unset = ask(&format!("GET {origin}/ PAY_KEY")).await;
    assert!(unset.contains("`skep secret set PAY_KEY`"), "{unset}");

    let (done, said) =
        skep(&host, &["secret", "set", "PAY_KEY", "--to", &origin], &format!("{VALUE}\n")).await;
    assert!(done && said == "PAY_KEY is set\n", "{said}");
    let answer = ask(&format!("GET {origin}/ PAY_KEY")).await;
    assert!(answer.contains("authorization: Bearer secret.PAY_KEY.") && !answer.contains(VALUE), "{answer}");
    let elsewhere = ask("GET http://localhost:1/ PAY_KEY").await;
    assert!(
        elsewhere.contains("the secret \"PAY_KEY\" may not be sent to http://localhost:1"),
        "{elsewhere}"
    );

    let (_, listed) = skep(&host, &["secret", "list", "--json"], "").await;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        (listed[0]["name"].as_str(), listed[0]["hosts"][0].as_str()),
        (Some("PAY_KEY"), Some(&*origin))
    );
    let (done, _) = skep(&host, &["secret", "delete", "PAY_KEY"], "").await;
    assert!(done);
    let (done, said) = skep(&host, &["secret", "delete", "PAY_KEY"], "").await;
    assert!(!done && said.contains("secret_not_found"), "{said}");
    let (done, said) = skep(&host, &["secret", "set", "PAY_KEY", "--to", &origin], "hunter2").await;
    assert!(!done && said.contains("it must have 12 to 4096") && !said.contains("hunter2"), "{said}");
    let (done, said) = skep(&host, &["secret", "set", "PAY_KEY", "--to", "example.com"], VALUE).await;
    assert!(!done && said.contains("is not a valid origin") && !said.contains(VALUE), "{said}");

    let metrics = client().get(host.at("/metrics")).send().await.unwrap().text().await.unwrap();
    for outcome in ["2xx", "secret_unset", "secret_not_granted"] {
        let line = format!("skep_fetches_total{{agent=\"payer\",outcome=\"{outcome}\"}}");
        assert!(metrics.contains(&line), "{line}");
    }
    host.stop();
    for file in std::fs::read_dir(data.path()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            let bytes = std::fs::read(file.path()).unwrap();
            let found = bytes.windows(VALUE.len()).any(|window| window == VALUE.as_bytes());
            assert!(!found, "{} holds the secret", file.path().display());
        }
    }
}

#[cfg(unix)]
#[tokio::test]
async fn files_of_a_host_are_readable_only_by_their_owner() {
    use std::os::unix::fs::PermissionsExt;
    let data = tempfile::tempdir().unwrap();
    let (origin, host) = (echo_server().await, host(Some(data.path())));
    let (done, said) = skep(&host, &["secret", "set", "KEY", "--to", &origin], VALUE).await;
    assert!(done, "{said}");
    for name in ["skep.db", "secrets.key"] {
        let mode = std::fs::metadata(data.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}
