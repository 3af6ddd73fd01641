# fish completion for fa3: options come from the program's own --help.
set -l commands run verify quantize bench info
function __fa3_options
    set -l words (commandline -opc)
    $words[1] $words[2] --help 2>/dev/null |
        string replace -rf '^ {2,6}(?:-., )?(--[a-z0-9-]*).*' '$1'
end
complete -c fa3 -f
complete -c fa3 -n "not __fish_seen_subcommand_from $commands" -a run -d 'attention on tensors in files'
complete -c fa3 -n "not __fish_seen_subcommand_from $commands" -a verify -d 'compare with a float64 reference'
complete -c fa3 -n "not __fish_seen_subcommand_from $commands" -a quantize -d 'FP8 codes and scales'
complete -c fa3 -n "not __fish_seen_subcommand_from $commands" -a bench -d 'measure speed'
complete -c fa3 -n "not __fish_seen_subcommand_from $commands" -a info -d 'devices, kernels, tensors of a file'
complete -c fa3 -n "__fish_seen_subcommand_from $commands" -a '(__fa3_options)'
complete -c fa3 -n "__fish_seen_subcommand_from run verify quantize info" -k -a '(__fish_complete_suffix .npy .safetensors)'
