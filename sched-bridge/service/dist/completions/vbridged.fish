complete -c vbridged -l config -d 'Configuration file (TOML); options on the command line take precedence' -r -F
complete -c vbridged -l control -d 'Unix socket for all requests; only its owner may use it' -r -F
complete -c vbridged -l listen -d 'TCP address for all requests; needs --tls-cert and --tls-key, unless it is a loopback address, and a token; or --insecure' -r
complete -c vbridged -l token-file -d 'File whose first line is a bearer token with which TCP clients may do everything; `tokens` in the configuration has others' -r -F
complete -c vbridged -l tls-cert -d 'Certificate chain of the bridge for TLS on TCP (PEM)' -r -F
complete -c vbridged -l tls-key -d 'Its private key (PEM)' -r -F
complete -c vbridged -l store -d 'Where the state is kept: redb:FILE for one bridge, etcd:URL[,URL...] for several' -r
complete -c vbridged -l etcd-max-txn-ops -d 'The --max-txn-ops that etcd was started with: it limits on how many nodes one request is placed' -r
complete -c vbridged -l metrics -d 'Serve Prometheus metrics here, at /metrics' -r
complete -c vbridged -l log-format -d 'Form of the log: text, or json with one object a line' -r -f -a "text\t'Lines for people'
json\t'One JSON object a line, with the spans that the event is part of'"
complete -c vbridged -l insecure -d 'Accept TCP requests without a token, if none is configured, and without TLS. Only for a network that you trust'
complete -c vbridged -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vbridged -s V -l version -d 'Print version'
