complete -c vmoved -l config -d 'Settings from a TOML file; flags override it' -r -F
complete -c vmoved -l node -d 'Name of this node, shown to peers and in reports [default: host name]' -r
complete -c vmoved -l control -d 'Unix socket for vmove, mode 0600 [default: VMOVE_CONTROL, or /run/vmove/control.sock]' -r -F
complete -c vmoved -l listen -d 'Address and port for peer daemons and for HTTP [default: `[::]:7420`; with --insecure 127.0.0.1:7420]' -r
complete -c vmoved -l state-dir -d 'Records of VMs and migrations; must survive a restart [default: /var/lib/vmove]' -r -F
complete -c vmoved -l memory-dir -d 'Guest memory: tmpfs and hugetlbfs are mounted below it [default: memory/ in the state folder]' -r -F
complete -c vmoved -l run-dir -d 'Working folders, sockets and logs of VMs [default: run/ in the state folder]' -r -F
complete -c vmoved -l fabric -d 'How pages cross; auto takes the best that both ends have' -r -f -a "auto\t'The best that both ends have'
local\t'Both daemons on one kernel (tests, moving between NUMA nodes)'
verbs\t'RDMA verbs'
tcp\t'TCP, with or without TLS'"
complete -c vmoved -l qemu-user -d 'User as whom QEMUs run, by name or number; root for none [default: vmove-qemu, or 60742 where there is no such user]' -r
complete -c vmoved -l qemu-sandbox -d 'Whether QEMUs refuse system calls that they do not need (-sandbox) [default: true]' -r -f -a "true\t''
false\t''"
complete -c vmoved -l rdma-device -d 'RDMA device (`mlx5_0`) [default: the first with an active port, RoCE before InfiniBand]' -r
complete -c vmoved -l rdma-port -d 'Port of the RDMA device, from 1 [default: its first active one]' -r
complete -c vmoved -l rdma-gid-index -d 'Index of the port\'s address [default: on Ethernet the first RoCE v2 address, of IPv4 if there is one; else 0]' -r
complete -c vmoved -l rdma-pkey-index -d 'Index of the partition key (P_Key) in the port\'s table, for InfiniBand [default: 0]' -r
complete -c vmoved -l rdma-service-level -d 'Service level (0 to 15) of RDMA connections: of urgent ones, then of bulk ones [default: 0,0]' -r
complete -c vmoved -l rdma-traffic-class -d 'Traffic class (0 to 255; on RoCE its upper six bits are the DSCP) of RDMA connections [default: 0,0]' -r
complete -c vmoved -l max-registered -d 'Guest memory that may be registered (pinned) for RDMA at once, such as 64GiB [default: all that the kernel allows]' -r
complete -c vmoved -l rdma-on-demand -d 'Register memory for on-demand paging, without pinning it, on devices that can [default: if-needed, where it cannot be pinned]' -r -f -a "never\t'What cannot be pinned crosses by tcp'
if-needed\t'Where memory cannot be pinned: --max-registered, RLIMIT_MEMLOCK'
always\t'Nothing is pinned'"
complete -c vmoved -l tls-cert -d 'Certificate chain of this node, PEM' -r -F
complete -c vmoved -l tls-key -d 'Private key of this node, PEM' -r -F
complete -c vmoved -l tls-ca -d 'Authority that signs every node\'s certificate, PEM' -r -F
complete -c vmoved -l metrics -d 'Serve Prometheus metrics here' -r
complete -c vmoved -l log-format -d 'Form of the log: text, or json with one object a line [default: text]' -r -f -a "text\t'Lines for people'
json\t'One JSON object a line, with the spans that the event is part of'"
complete -c vmoved -l insecure -d 'No TLS: anyone who reaches the port can read and replace guests. Listens on 127.0.0.1 only, unless --listen is given'
complete -c vmoved -l doctor -d 'Say as JSON what this host has and lacks, and end; `vmove doctor` shows it'
complete -c vmoved -s h -l help -d 'Print help (see more with \'--help\')'
complete -c vmoved -s V -l version -d 'Print version'
