//! Redirects: each hop is checked like a direct request.

use super::*;

fn redirect(status: u16, location: &str) -> String {
    format!(
        "HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn a_redirect_to_an_origin_that_is_not_granted_is_not_followed() {
    let forbidden = Server::answering(|_| OK).await;
    let target = forbidden.url("/secret");
    let server = Server::answering(move |_| redirect(302, &target)).await;
    let policy = Policy::default().and(origins(&[&server.url("")]), "hosts under [grants] in agent.toml");
    let error = client().send(get(&server.url("/")), &policy, &bounds()).await.expect_err("not granted");
    assert!(matches!(error, OutboundError::NotGranted { .. }), "{error}");
    assert_eq!((server.requests().len(), forbidden.connections()), (1, 0));
}

#[tokio::test]
async fn a_redirect_to_a_private_address_is_not_followed() {
    let inside = Server::answering(|_| OK).await;
    let client_of_one = |port: u16| {
        Client::new(Options { addresses: allowing(&[&format!("127.0.0.1:{port}")]), ..Options::default() })
    };
    for location in [
        "http://169.254.169.254/",
        &inside.url("/"),
        &format!("http://localhost:{}/", inside.port()),
        "http://[::1]/",
    ] {
        let target = location.to_owned();
        let server = Server::answering(move |_| redirect(307, &target)).await;
        let client = client_of_one(server.port());
        let error = client.send(get(&server.url("/")), &everywhere(), &bounds()).await.expect_err(location);
        assert!(matches!(error, OutboundError::AddressDenied { .. }), "{location}: {error}");
    }
    assert_eq!(inside.connections(), 0);
}

#[tokio::test]
async fn the_number_of_redirects_is_limited() {
    let server = Server::answering(|_| redirect(302, "/again")).await;
    let send = async |redirects: usize| {
        client().send(get(&server.url("/")), &everywhere(), &Bounds { redirects, ..bounds() }).await
    };
    assert_eq!(send(3).await.expect_err("a loop"), OutboundError::TooManyRedirects { limit: 3 });
    assert_eq!(server.requests().len(), 4);
    assert_eq!(send(0).await.expect("the redirect is the answer").status, 302);
}

#[tokio::test]
async fn credentials_follow_a_redirect_only_within_the_origin() {
    let other = Server::answering(|_| OK).await;
    let target = other.url("/there");
    let server = Server::answering(move |request| match request.starts_with("GET /a ") {
        true => redirect(302, "/b"),
        false => redirect(302, &target),
    })
    .await;
    let request = get(&server.url("/a")).header("Authorization", "Bearer t").expect("valid");
    let response = client().send(request, &everywhere(), &bounds()).await.expect("followed");
    assert_eq!(response.url.as_str(), other.url("/there"));
    assert!(server.requests().iter().all(|request| request.contains("authorization: Bearer t")));
    let there = other.requests().pop().expect("it was followed");
    assert!(!there.contains("authorization"), "{there}");
}
