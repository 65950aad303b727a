//! The S3 origin of the tests as a program, for clients that are not written in Rust.
//!
//! Prints `listening ADDR` and `counts ADDR` once both are bound; the second answers every request with the
//! counters as one line of JSON.

use clap::Parser;
use forebay_tests::s3::S3Origin;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::io::AsyncWriteExt;

#[derive(Parser)]
struct Options {
    /// Directory whose subdirectories are the buckets.
    root: PathBuf,
    /// Where S3 is spoken; port 0 picks a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Where the counters are told.
    #[arg(long, default_value = "127.0.0.1:0")]
    counts: SocketAddr,
    /// The one access key that is accepted.
    #[arg(long)]
    access_key: String,
    /// Its secret.
    #[arg(long)]
    secret_key: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    let origin = S3Origin::new(&options.root, &options.access_key, &options.secret_key)?;
    let counts = tokio::net::TcpListener::bind(options.counts).await?;
    say(format_args!("counts {}", counts.local_addr()?));
    tokio::spawn(tell_counts(counts, origin.clone()));
    origin.serve(options.listen, |address| say(format_args!("listening {address}"))).await?;
    Ok(())
}

async fn tell_counts(listener: tokio::net::TcpListener, origin: S3Origin) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let counts = origin.counts();
        let body = serde_json::json!({
            "gets": counts.gets,
            "bodies": counts.bodies,
            "heads": counts.heads,
            "puts": counts.puts,
            "deletes": counts.deletes,
            "not_modified": counts.not_modified,
            "failed_conditions": counts.failed_conditions,
            "body_bytes": counts.body_bytes,
        })
        .to_string();
        let mut request = [0; 4096];
        // One read is enough: the question is always the same, and only the tests ask it.
        drop(tokio::io::AsyncReadExt::read(&mut stream, &mut request).await);
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        drop(stream.write_all(answer.as_bytes()).await);
    }
}

fn say(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    drop(writeln!(out, "{line}"));
    drop(out.flush());
}
