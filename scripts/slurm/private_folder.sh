#!/bin/bash
# Creates the folder $1 with mode 0700, or checks an existing one. Prints the reason and returns 2 if other users could
# have put files into it: the job imports and executes files of this folder, and names below /tmp can be predicted.
folder="${1%/}"
found=""
mkdir -p "$(dirname "$folder")" 2>/dev/null
mkdir -m 0700 "$folder" 2>/dev/null # a restart of the job, or another rank of this node, may have created it
if [ -L "$folder" ]; then
    found="is a link"
elif [ ! -d "$folder" ]; then
    found="cannot be created"
elif [ ! -O "$folder" ]; then
    found="belongs to $(stat -c %U "$folder")"
elif [ -n "$(find "$folder" -maxdepth 0 -perm /022)" ]; then
    found="can be written by other users (mode $(stat -c %a "$folder"))"
fi
if [ -z "$found" ]; then exit 0; fi
echo "NODE_DIR: $folder on $(hostname -s) $found; set NODE_DIR to a folder of your own with mode 0700, or to a new one"
exit 2
